"""The black box can be read back whatever happened to its writer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import awaited

from torchmedic.errors import UnreadableRun
from torchmedic.observe.step.blackbox import BlackBox, FileBox
from torchmedic.runfolder import black_box, layout
from torchmedic.runfolder.black_box import SLOTS
from torchmedic.supervise.boxes import BoxKeeper, read_box


def write(box: FileBox, step: int, file: str = "/home/me/train.py") -> None:
    box.write(step % 5, step, step % 7, step + 1, file, step % 1000 + 1, step * 2, step * 3)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    box = FileBox(tmp_path / "box")
    for step in range(3):
        write(box, step, f"/home/me/{step}.py")

    found = black_box.read(tmp_path / "box")

    assert (found.pid, found.clean_exit) == (os.getpid(), False)
    assert [(moment.step, moment.file) for moment in found.moments] == [(n, f"/home/me/{n}.py") for n in range(3)]
    assert found.last is not None
    last = found.last
    assert (last.micro_step, last.updates, last.phase, last.line, last.rss, last.device_memory) == (
        2,
        3,
        "forward",
        3,
        4,
        6,
    )


def test_only_the_last_moments_are_kept(tmp_path: Path) -> None:
    box = FileBox(tmp_path / "box")
    for step in range(3 * SLOTS + 5):
        write(box, step)
    box.mark_clean_exit()

    found = black_box.read(tmp_path / "box")

    assert [moment.step for moment in found.moments] == list(range(2 * SLOTS + 5, 3 * SLOTS + 5))
    assert found.clean_exit


def test_more_files_than_the_table_holds(tmp_path: Path) -> None:
    box = FileBox(tmp_path / "box")
    for step in range(200):
        write(box, step, f"/{'x' * 300}/{step}.py")
    write(box, 200, "/home/me/train.py")

    found = black_box.read(tmp_path / "box")

    assert found.moments[0].file.endswith("/0.py")
    assert found.moments[150].file == ""
    assert [moment.step for moment in found.moments] == list(range(201))


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.004, 0.011, 0.02, 0.03])
def test_a_writer_that_is_killed_leaves_whole_moments(tmp_path: Path, delay: float) -> None:
    path = tmp_path / "box"
    pid = os.fork()
    if pid == 0:
        box, step = FileBox(path), 0
        while True:
            write(box, step, f"/home/me/{step % 20}.py")
            step += 1
    awaited(lambda: path.exists() and path.read_bytes().startswith(black_box.MAGIC))
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    moments = black_box.read(path).moments

    steps = [moment.step for moment in moments]
    # At most the moment that was being written is missing.
    assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    for moment in moments:
        assert (moment.rss, moment.device_memory, moment.updates) == (moment.step * 2, moment.step * 3, moment.step + 1)
        assert moment.file == f"/home/me/{moment.step % 20}.py"


def test_half_a_moment_is_passed_over(tmp_path: Path) -> None:
    box = FileBox(tmp_path / "box")
    write(box, 0)
    write(box, 1)
    data = bytearray((tmp_path / "box").read_bytes())
    second = 64 + 32 * 1024 + 2 * 64
    data[second] += 7  # its number in front is already that of the next, the one behind still its own
    (tmp_path / "box").write_bytes(data)

    assert [moment.step for moment in black_box.read(tmp_path / "box").moments] == [0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_named_or_passed_over(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "box"
    path.unlink(missing_ok=True)
    box = FileBox(path)
    for step in range(5):
        write(box, step)
    raw = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(raw)))
    for _ in range(data.draw(st.integers(0, 20))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        black_box.read(path)
    except UnreadableRun as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_missing_box_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match="cannot read"):
        black_box.read(tmp_path / "nothing")


def test_a_follower_finds_the_last_moment_wherever_the_ring_begins(tmp_path: Path) -> None:
    box, steps = FileBox(tmp_path / "box"), 0
    follower = black_box.Follower(tmp_path / "box")
    for more in (0, 1, 2, 900, 1023, 1024, 1025, 3000, 1, 0, 7):
        for _ in range(more):
            write(box, steps)
            steps += 1
        seen = [beat.step for beat in follower.new(12)]

        assert seen == list(range(steps - min(more, 12), steps))


def test_a_box_in_memory_cannot_be_truncated_and_is_handed_over(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    keeper = BoxKeeper(tmp_path, None)
    pid = os.fork()
    if pid == 0:
        box = BlackBox()
        with pytest.raises(PermissionError):
            os.ftruncate(box.descriptor, 0)
        box.hand_over([layout.box_address(tmp_path, 0), layout.box_address(tmp_path, None)], "rank0")
        write(box, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not (tmp_path / "rank0" / "blackbox").exists()

    keeper.close()

    assert [moment.step for moment in black_box.read(tmp_path / "rank0" / "blackbox").moments] == [7]
    assert not layout.box_address(tmp_path, None).exists()


def test_a_box_is_read_from_its_process_where_nothing_can_be_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    box = BlackBox()
    write(box, 3)
    (folder / "events.jsonl").write_text(f'{{"kind":"start","pid":{os.getpid()},"box":{box.descriptor}}}\n')
    monkeypatch.setattr(BoxKeeper, "_listen", lambda self: os.stat("/nothing"))  # no sockets in this file system
    keeper = BoxKeeper(tmp_path, None)
    assert not box.hand_over([layout.box_address(tmp_path, None)], "rank0")

    found = read_box(folder)
    keeper.close()

    assert found is not None
    assert found.last is not None
    assert found.last.step == 3
    box.close()
    assert black_box.read(folder / "blackbox").last == found.last


def test_another_file_under_the_number_of_a_box_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "other", "wb") as other:
        (tmp_path / "events.jsonl").write_text(f'{{"kind":"start","pid":{os.getpid()},"box":{other.fileno()}}}\n')

        assert read_box(tmp_path) is None
