"""The logs of ranks on other hosts come through the store of the job, and are read as data."""

from __future__ import annotations

import zlib
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch

from torchmedic.observe.ranks import store_mail
from torchmedic.observe.ranks.store_mail import StoreMail
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog, RemoteRank
from torchmedic.runfolder import files, ring
from torchmedic.supervise import ranks


def log(rank: int, *ops: str, file: str = "train.py") -> RankLog:
    frame = StackFrame(file=file, line=7, function="train")
    calls = tuple(Collective(op=op, frames=(frame,), time=float(at)) for at, op in enumerate(ops))
    return RankLog(rank=rank, pid=1, world_size=2, calls=calls, complete=True)


@pytest.fixture
def store() -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


def test_each_host_gets_the_log_of_the_other(
    tmp_path: Path, store: torch.distributed.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    hosts = [tmp_path / "a", tmp_path / "b"]
    for host in hosts:
        host.mkdir()
    mail = StoreMail(torch.distributed.PrefixStore("x", store))
    assert mail.is_needed(log(0))
    mail.exchange(hosts[0], log(0, "barrier"), "ended")  # nobody else has written yet, and it does not wait
    mail.exchange(hosts[1], log(1, "all_reduce"), "running")
    mail.exchange(hosts[0], log(0, "barrier"), "running")
    told = msgspec.json.decode((hosts[0] / files.REMOTE_RANKS / "1.json").read_bytes(), type=RemoteRank)
    assert (told.log.calls[0].op, told.fate) == ("all_reduce", "running")
    told = msgspec.json.decode((hosts[1] / files.REMOTE_RANKS / "0.json").read_bytes(), type=RemoteRank)
    assert (told.log.calls[0].op, told.fate) == ("barrier", "ended")


def test_one_host_or_a_store_that_is_gone_needs_no_mail(
    tmp_path: Path, store: torch.distributed.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not StoreMail(store).is_needed(log(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not StoreMail(torch.distributed.HashStore()).is_needed(log(0))
    gone = StoreMail(store)
    gone._address = ("127.0.0.1", 1)
    gone.exchange(tmp_path, log(0), "running")
    assert not (tmp_path / files.REMOTE_RANKS).exists()


@pytest.mark.parametrize(
    "letter", [b"no letter", zlib.compress(b"{"), zlib.compress(bytes(64 << 20)), bytes(2 << 20)],
    ids=["plain", "damaged", "bomb", "large"],
)  # fmt: skip
def test_what_is_no_log_is_left_out(tmp_path: Path, store: torch.distributed.TCPStore, letter: bytes) -> None:
    store.set(f"{store_mail._KEY}1", letter)
    StoreMail(store).exchange(tmp_path, log(0, "barrier"), "ended")
    assert list((tmp_path / files.REMOTE_RANKS).iterdir()) == []


def test_the_job_is_compared_across_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host has the same script in another folder."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "run" / "rank0"
    own.mkdir(parents=True)
    made = ring.Ring(own / ring.FILE, 0, 2)
    site = made.enter(((str(tmp_path / "train.py"), 7, "train"),))
    made.write(ring.described("broadcast", "0", ((2,),), ("float32",), 0), 1, site)
    made.write(ring.described("barrier", "0", (), (), None), 2, site)
    there = log(1, "broadcast", "all_reduce", file="/elsewhere/train.py")
    first = msgspec.structs.replace(there.calls[0], shapes=((2,),), dtypes=("float32",), peer=0)
    remote = RemoteRank(log=msgspec.structs.replace(there, calls=(first, there.calls[1])), folder="/elsewhere")
    folder = tmp_path / "run" / files.REMOTE_RANKS
    folder.mkdir()
    (folder / "1.json").write_bytes(msgspec.json.encode(remote))
    job = ranks.read_job(tmp_path / "run")
    assert job is not None
    assert job.difference is not None
    assert [state.rank for state in job.ranks] == [0, 1]
    assert job.difference.before is not None
    assert job.difference.before.op == "broadcast"  # the same line on both hosts
