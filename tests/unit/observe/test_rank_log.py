"""The log of collectives: the ring outlives its writer, and what the Flight Recorder gives is never unpickled."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmedic.errors import UnreadableRun
from torchmedic.observe.ranks import plain_pickle
from torchmedic.observe.ranks.call_site import CallSites
from torchmedic.observe.ranks.facts import FactsOfRank
from torchmedic.observe.ranks.recorder import Recorder
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.blackbox import hand_over
from torchmedic.observe.step.clock import Clock
from torchmedic.runfolder import files, layout, ring
from torchmedic.supervise.boxes import BoxKeeper

LINES = (("train.py", 12, "step"), ("train.py", 40, "main"))


def test_calls_come_back_in_order_with_their_lines(tmp_path: Path) -> None:
    writer = ring.Ring(tmp_path / ring.FILE, rank=1, world_size=2)
    site = writer.enter(LINES)
    for number in range(3):
        writer.write(ring.described("all_reduce", "0", ((number, 4),), ("float32",), None), number + 1, site)
    log = ring.read(tmp_path / ring.FILE)
    assert (log.rank, log.world_size, log.pid, log.dropped) == (1, 2, os.getpid(), 0)
    assert [(call.shapes, call.ordinal) for call in log.calls] == [(((0, 4),), 1), (((1, 4),), 2), (((2, 4),), 3)]
    assert log.calls[0].site == (("train.py", 12), ("train.py", 40))


def test_lines_of_libraries_come_back_beside_those_of_the_user(tmp_path: Path) -> None:
    writer = ring.Ring(tmp_path / ring.FILE, rank=0, world_size=2)
    site = writer.enter(LINES, (("trainer.py", 900, "train"),))
    writer.write(ring.described("barrier", "0", (), (), None), 1, site)
    (call,) = ring.read(tmp_path / ring.FILE).calls
    assert call.path == ((("train.py", 12), ("train.py", 40)), (("trainer.py", 900),))


def test_the_last_call_is_read_alone(tmp_path: Path) -> None:
    writer = ring.Ring(tmp_path / ring.FILE, rank=0, world_size=2)
    assert ring.read_last(tmp_path / ring.FILE) == (0, None)
    site = writer.enter(LINES)
    for number in range(ring.SLOTS + 3):
        writer.write(ring.described("all_reduce", "0", (), (), None), number + 1, site)
    count, call = ring.read_last(tmp_path / ring.FILE)
    assert (count, call and call.ordinal, call and call.site) == (
        ring.SLOTS + 3,
        ring.SLOTS + 3,
        (("train.py", 12), ("train.py", 40)),
    )


def test_the_oldest_calls_are_overwritten_and_counted(tmp_path: Path) -> None:
    writer = ring.Ring(tmp_path / ring.FILE, 0, 2)
    for number in range(ring.SLOTS + 10):
        writer.write(ring.described("barrier", "0", (), (), None), number + 1, 0)
    log = ring.read(tmp_path / ring.FILE)
    assert (len(log.calls), log.dropped, log.calls[0].ordinal) == (ring.SLOTS, 10, 11)


def test_a_call_that_was_half_written_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / ring.FILE
    writer = ring.Ring(path, 0, 2)
    for number in (1, 2):
        writer.write(ring.described("barrier", "0", (), (), None), number, 0)
    data = bytearray(path.read_bytes())
    at = ring._RING_AT + 2 * ring._SLOT_SIZE
    struct.pack_into("<Q", data, at, 77)  # the number in front is new, the one behind is not
    path.write_bytes(bytes(data))
    assert [call.ordinal for call in ring.read(path).calls] == [1]


def test_many_tensors_fit_by_their_first(tmp_path: Path) -> None:
    text = ring.described(
        "all_gather", "a_group", tuple((1024, 1024, size) for size in range(90)), ("bfloat16",) * 90, 3
    )
    writer = ring.Ring(tmp_path / ring.FILE, 0, 2)
    writer.write(text, 1, 0)
    (call,) = ring.read(tmp_path / ring.FILE).calls
    assert (call.op, call.group, call.peer, len(call.shapes)) == ("all_gather", "a_group", 3, 4)


def test_a_tag_and_dtypes_without_shapes_come_back(tmp_path: Path) -> None:
    writer = ring.Ring(tmp_path / ring.FILE, 0, 2)
    writer.write(ring.described("send", "0", ((4,),), ("float32",), 1, 7), 1, 0)
    writer.write(ring.described("DistributedDataParallel", "0", (), ("float32", "bfloat16"), None), 2, 0)
    send, wrapped = ring.read(tmp_path / ring.FILE).calls
    assert (send.peer, send.tag, wrapped.tag, wrapped.dtypes) == (1, 7, 0, ("float32", "bfloat16"))


def recorded(run: Path) -> ring.Ring:
    """The ring of a process that hands its memory to a parent which listens, if there is one."""
    (run / "rank1").mkdir(exist_ok=True)
    addresses = [layout.box_address(run, 1), layout.box_address(run, None)]
    recorder = Recorder(lambda *_: run / "rank1", lambda *memory: hand_over(memory[0], addresses, memory[1]))
    writer = recorder._open(1, 2)
    assert writer is not None
    return writer


def note(writer: ring.Ring, first: int, count: int) -> None:
    for number in range(first, first + count):
        line = writer.enter((("train.py", number, "step"),)) if number < 5 else 1
        writer.write(ring.described("barrier", "0", (), (), None), number, line)


def ordinals(path: Path) -> list[int]:
    return [call.ordinal for call in ring.read(path).calls]


@pytest.mark.parametrize("others", [1, 100, ring.SLOTS + 7, 2 * ring.SLOTS + 1])
def test_a_ring_in_memory_outlives_a_process_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    path, last = tmp_path / "rank1" / ring.FILE, 4 + others
    keeper = BoxKeeper(tmp_path, None)
    files.write_supervisor(tmp_path, None)
    go, stop = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = recorded(tmp_path)
        note(writer, 1, 4)
        with pytest.raises(PermissionError):
            os.ftruncate(writer._in_memory, 0)
        os.write(go[1], b"1")
        os.read(stop[0], 1)
        note(writer, 5, others)
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(go[0], 1)
    assert ordinals(path) == [1, 2, 3, 4]
    keeper.look()  # receives the memory, and copies
    os.write(stop[1], b"1")
    os.waitpid(pid, 0)

    expected = list(range(max(1, last - ring.SLOTS + 1), last + 1))
    assert ordinals(path) == expected  # from the parent
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ring, "_in_memory", lambda *_: None)  # as on another host
        assert ordinals(path) == [1, 2, 3, 4, 5]  # the next write sees that the parent holds the memory
        keeper.close()
        assert ordinals(path) == expected
    assert ordinals(path) == expected
    assert [call.line for call in ring.read(path).calls[-1].frames] == [1]


def test_a_ring_stays_in_its_file_until_a_parent_holds_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank1" / ring.FILE
    alone = recorded(tmp_path)
    note(alone, 1, 3)
    assert alone._memory is None
    keeper = BoxKeeper(tmp_path, None)
    writer = recorded(tmp_path)
    note(writer, 1, 7)
    assert writer._memory is not None
    os.close(writer._in_memory)
    writer._in_memory = -1
    assert ordinals(path) == list(range(1, 8))
    keeper.close()


def test_the_memory_of_another_ring_is_not_read(tmp_path: Path) -> None:
    keeper = BoxKeeper(tmp_path, None)
    writer = recorded(tmp_path)
    note(writer, 1, 2)
    path = tmp_path / "rank1" / ring.FILE
    header = [*ring._HEADER.unpack_from(path.read_bytes())]
    header[-1] ^= 1  # another token
    path.write_bytes(ring._HEADER.pack(*header) + path.read_bytes()[ring._HEADER.size :])
    writer._is_held = True
    note(writer, 3, 1)
    assert ordinals(path) == [1, 2]
    keeper.close()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 1000)
    with pytest.raises(UnreadableRun):
        ring.read(tmp_path / "other")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_is_read(protocol: int) -> None:
    data = {"entries": [{"a": (1, 2, 3, 4), "b": [True, None, 2.5], "c": {"x": "y"}}, {"a": ()}], "n": 1 << 40}
    assert plain_pickle.loads(pickle.dumps(data, protocol=protocol)) == data


def test_nothing_is_ever_called() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("exit 1",)

    with pytest.raises(ValueError, match="not plain data"):
        plain_pickle.loads(pickle.dumps(Evil()))


@pytest.mark.parametrize("data", [b"", b"\x80\x02]q", pickle.dumps([1, 2])[:-1]])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"damaged|pickle|not enough|expected|exhausted"):
        plain_pickle.loads(data)


def test_batches_are_wanted_only_once_there_is_a_loader(tmp_path: Path) -> None:
    """A rank that wants batches takes no fast steps."""
    facts = FactsOfRank(tmp_path, 0, 2, Batches(), Clock())
    loading = iter(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1))
    wanted = [facts.wants_batches]
    for batch in loading:
        facts.fetched(loading, batch, sys._getframe())
        wanted.append(facts.wants_batches)
        facts.updates += 1
        facts.stepped()
    assert wanted == [False, *[True] * 4, *[False] * 4]


def test_a_call_site_is_that_of_the_present_callers_and_not_of_the_last_ones(tmp_path: Path) -> None:
    sites, writer = CallSites(), ring.Ring(tmp_path / ring.FILE, 0, 2)

    def call() -> int:
        return sites.number(b"all_reduce", writer)

    def deeper() -> int:
        return call()

    first = [call() for _ in range(3)]
    second = [call() for _ in range(3)]
    third = [deeper() for _ in range(3)]
    assert [len(set(each)) for each in (first, second, third)] == [1, 1, 1]
    assert len({first[0], second[0], third[0]}) == 3
    assert sites.number(b"barrier", writer) not in (first[0], second[0], third[0])

    inside: list[int] = []
    thread = threading.Thread(target=lambda: inside.append(call()))  # a stack that ends elsewhere
    thread.start()
    thread.join()
    assert inside[0] not in (first[0], second[0], third[0])
    assert call() != inside[0]
