"""Which deaths are incidents, whose line is to blame, and how sure the claim may be."""

from __future__ import annotations

import time
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
from msgspec.structs import replace

from torchmedic.detect.failures.death import (
    fatal_signal,
    is_told_by_loader,
    lost_senders,
    named_death,
    raised_elsewhere,
    read_stacks,
    signal_name,
)
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose
from torchmedic.records import BoxContents, Diagnosis, Moment, SignalOrigin, StackFrame, ThreadStack
from torchmedic.records.death import Death

DUMP = """Fatal Python error: Segmentation fault

Thread 0x00007f0001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/feeder.py", line 9 in feed

Current thread 0x00007f0002 (most recent call first):
  File "/venv/lib/python3.11/site-packages/fastops/ops.py", line 41 in call
  File "/home/me/model.py", line 12 in forward
  File "/home/me/my "odd" file.py", line ??? in main

Extension modules: numpy.core, torch._C (total: 2)
"""


def test_statuses() -> None:
    assert [signal_name(status) for status in (-9, 137, -11, 1, 0, 128, 255, -64)] == [
        "SIGKILL",
        "SIGKILL",
        "SIGSEGV",
        None,
        None,
        None,
        None,
        "SIGRTMAX",
    ]


def test_a_dump_is_read(tmp_path: Path) -> None:
    (tmp_path / "dump").write_text(DUMP)
    fatal, (current, other) = read_stacks(tmp_path / "dump")
    assert fatal_signal(fatal) == "SIGSEGV"
    assert current.current
    assert not other.current
    assert [(frame.line, frame.function) for frame in current.frames] == [(41, "call"), (12, "forward"), (0, "main")]
    assert read_stacks(tmp_path / "none") == ("", ())


def death(signal: str, **fields: Any) -> Death:
    moment = Moment(
        time=time.time() - 3,
        step=5,
        micro_step=0,
        updates=5,
        phase="forward",
        file="/home/me/train.py",
        line=30,
        rss=1 << 30,
        device_memory=0,
    )
    box = BoxContents(pid=7, started=0.0, clean_exit=False, moments=(moment,))
    return Death(pid=7, signal=signal, **{"box": box, "ended": time.time(), **fields})


def explain(case: Death) -> Diagnosis:
    return diagnose(case, registry.DEATHS)


def threads(*files: str) -> tuple[ThreadStack, ...]:
    frames = tuple(StackFrame(file=file, line=number + 1, function=f"f{number}") for number, file in enumerate(files))
    return (ThreadStack(current=True, frames=frames),)


@pytest.mark.parametrize(
    ("signal", "code"),
    [("SIGSEGV", "TM801"), ("SIGABRT", "TM802"), ("SIGBUS", "TM803"), ("SIGILL", "TM804"), ("SIGFPE", "TM807")],
)
def test_the_dump_names_the_line(signal: str, code: str) -> None:
    inside = "/venv/lib/python3.11/site-packages/fastops/ops.py"
    case = death(signal, threads=threads(inside, "/home/me/model.py", "/home/me/train.py"))
    assert explain(case).grade == "likely"  # another process may have sent the signal
    own = SignalOrigin(number=Signals[signal], code=1, address=16)
    case = replace(case, box=replace(case.box, signal=own))
    found = explain(case)
    assert (found.code, found.grade, found.step) == (code, "proven", 5)
    sent = SignalOrigin(number=Signals[signal], code=0, pid=4711)
    assert explain(replace(case, box=replace(case.box, signal=sent))).code == "TM805"
    assert found.cause_location is not None
    assert (found.cause_location.file, found.cause_location.line) == ("/home/me/model.py", 2)
    assert any("/home/me/train.py:3" in fact for fact in found.evidence)


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_without_a_dump_the_line_is_only_the_last_seen(signal: str) -> None:
    found = explain(death(signal))
    assert found.grade == "likely"
    assert found.cause_location is not None
    assert (found.cause_location.file, found.cause_location.line) == ("/home/me/train.py", 30)
    assert "last seen here, 3 s before" in found.cause_location.label


def test_a_thread_that_python_does_not_know(tmp_path: Path) -> None:
    stack = ThreadStack(current=False, frames=(StackFrame(file="/home/me/train.py", line=31, function="main"),))
    found = explain(death("SIGSEGV", threads=(stack,)))
    assert found.grade == "likely"
    assert found.cause_location is not None
    assert found.cause_location.line == 31


def test_deep_recursion_is_named() -> None:
    found = explain(death("SIGSEGV", threads=threads(*["/home/me/tree.py"] * 100)))
    assert any("recursion" in fact for fact in found.evidence)


def test_a_crash_after_the_end(tmp_path: Path) -> None:
    box = BoxContents(pid=7, started=0.0, clean_exit=True, moments=())
    found = explain(death("SIGSEGV", box=box))
    assert "shutting down" in found.message
    assert (found.grade, found.locations) == ("possible", ())


GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "code", "grade"),
    [
        ({"oom_kills": 1}, "TM806", "proven"),
        ({"oom_kills": 0, "kernel_lines": ("[1.0] Out of memory: Killed process 7 (python)",)}, "TM806", "proven"),
        # The limit of the group: counted, in the log, or only near. A kill for the whole host is counted in it too.
        ({"oom_kills": 1, "memory_limit": 8 * GIB, "limit_hits": 3}, "TM417", "proven"),
        ({"oom_kills": 1, "memory_limit": 8 * GIB, "peak_rss": 7.9 * GIB}, "TM417", "proven"),
        ({"memory_limit": GIB, "kernel_lines": ("Memory cgroup out of memory: Killed process 7",)}, "TM417", "proven"),
        ({"oom_kills": 0, "memory_limit": 8 * GIB, "peak_rss": 7.9 * GIB}, "TM417", "likely"),
        ({"oom_kills": 1, "memory_limit": 8 * GIB, "limit_hits": 0}, "TM806", "proven"),
        ({"oom_kills": 1, "memory_limit": 8 * GIB, "peak_rss": 2 * GIB}, "TM806", "proven"),
        ({"memory_limit": GIB, "kernel_lines": ("Out of memory: Killed process 7",)}, "TM806", "proven"),
        ({"oom_kills": None, "host_memory": 8 * GIB, "peak_rss": 7.9 * GIB}, "TM806", "likely"),
        ({"oom_kills": 0, "host_oom_kills": 1}, "TM806", "likely"),
        ({"oom_kills": 0, "memory_limit": 8 * GIB, "peak_rss": 2 * GIB}, "TM805", "likely"),
        ({"oom_kills": None, "kernel_lines": ("[1.0] python[7]: segfault at 0",)}, "TM805", "likely"),
        ({}, "TM805", "likely"),
    ],
)
def test_killed_and_what_can_be_known_of_it(facts: dict[str, Any], code: str, grade: str) -> None:
    facts = {key: int(value) if isinstance(value, float) else value for key, value in facts.items()}
    found = explain(death("SIGKILL", **facts))
    assert (found.code, found.grade) == (code, grade)


def test_memory_that_grew_is_named() -> None:
    case = death("SIGKILL", oom_kills=1)
    assert case.box is not None
    first = case.box.moments[0]
    moments = tuple(
        Moment(**{name: getattr(first, name) for name in first.__struct_fields__} | {"step": n, "rss": n * GIB})
        for n in range(1, 5)
    )
    box = BoxContents(pid=7, started=0.0, clean_exit=False, moments=moments)
    found = explain(death("SIGKILL", oom_kills=1, box=box))
    assert any("grew by 1.0 GiB a step" in fact for fact in found.evidence)


@pytest.mark.parametrize(
    ("free", "grade", "code"), [(0, "proven", "TM415"), (64 << 20, "likely", "TM803"), (None, "likely", "TM803")]
)
def test_shared_memory_is_full_only_if_it_was_seen_to_be(free: int | None, grade: str, code: str) -> None:
    found = explain(death("SIGBUS", shm_low=free, shm_size=64 << 20))
    assert (found.grade, found.code) == (grade, code)
    assert ("in /dev/shm (64.0 MiB)" in found.message) is (code == "TM415")


def test_a_worker_with_the_shared_memory_of_a_container() -> None:
    found = explain(death("SIGBUS", part="worker", shm_low=32 << 20, shm_size=64 << 20))
    assert (found.code, found.grade) == ("TM415", "likely")
    assert explain(death("SIGBUS", part="worker", shm_low=8 * GIB, shm_size=12 * GIB)).code == "TM803"


class ProcessRaisedException(Exception):
    error_pid = 12


class ProcessExitedException(Exception):
    error_pid = 12
    signal_name = "SIGKILL"


class Failure:
    def __init__(self, pid: int, exitcode: int, timestamp: int) -> None:
        self.pid, self.exitcode, self.timestamp = pid, exitcode, timestamp


class ChildFailedError(Exception):
    def __init__(self) -> None:
        self.failures = {0: Failure(20, -15, 1), 1: Failure(21, -9, 3), 2: Failure(22, -11, 2)}


def test_exceptions_that_only_pass_on_a_death() -> None:
    found = named_death(ProcessExitedException())
    assert found is not None
    assert (found.pid, found.signal, found.part) == (12, "SIGKILL", "child")
    found = named_death(RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error. It is possible that"))
    assert found is not None
    assert (found.pid, found.signal, found.part) == (3, "SIGBUS", "worker")
    found = named_death(ChildFailedError())
    assert found is not None
    assert (found.pid, found.signal) == (22, "SIGSEGV")
    assert named_death(ProcessRaisedException()) is None
    assert raised_elsewhere(ProcessRaisedException()) == 12
    assert named_death(RuntimeError("DataLoader worker (pid(s) 3) exited unexpectedly")) is None
    assert named_death(ConnectionResetError()) is None
    assert named_death(KeyError("a")) is None


class Gone:
    """Such as `multiprocessing.Process` is, once it has ended."""

    def __init__(self, pid: int, exitcode: int | None) -> None:
        self.pid, self.exitcode = pid, exitcode


class Loader:
    """As torch's iterator, which fetches the memory of a batch from the worker that made it."""

    def __init__(self, error: Exception, *workers: Gone) -> None:
        self.error, self._workers = error, list(workers)

    def get(self) -> None:
        def rebuild_storage_fd() -> None:
            raise self.error

        rebuild_storage_fd()

    def wait(self) -> None:
        raise self.error


def noticed(work: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        work()
    return caught.value


@pytest.mark.parametrize("kind", [ConnectionResetError, FileNotFoundError, EOFError])
def test_a_sender_that_is_gone_is_known_however_that_is_noticed(kind: type[Exception]) -> None:
    error = noticed(Loader(kind(), Gone(1, None), Gone(2, -9)).get)
    assert [worker.pid for worker in lost_senders(error)] == [2]
    death = named_death(error)
    assert death is not None
    assert (death.pid, death.signal, death.part) == (2, "SIGKILL", "worker")


def test_a_file_that_is_not_there_is_no_lost_sender() -> None:
    error = noticed(Loader(FileNotFoundError(), Gone(2, -9)).wait)
    assert (lost_senders(error), named_death(error)) == ([], None)


def test_the_thread_that_pins_batches_leaves_it_to_the_loader() -> None:
    def _pin_memory_loop() -> None:
        Loader(ConnectionResetError()).get()

    assert is_told_by_loader(noticed(_pin_memory_loop))
    assert not is_told_by_loader(noticed(Loader(ConnectionResetError()).get))
    ended = noticed(Loader(RuntimeError("Pin memory thread exited unexpectedly"), Gone(1, 0), Gone(2, -9)).wait)
    assert [worker.pid for worker in lost_senders(ended)] == [2]
