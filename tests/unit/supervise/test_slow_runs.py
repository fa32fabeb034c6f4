"""Runs that are slow and not hung, and those that only look so: from records, and from real processes that sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import child, linux_only, seen
from stalls import PID, asked, box, inside, library, process, stall, thread, user

from torchmedic.records.inside import JobView, LockView, LoopView, PyThread
from torchmedic.records.process import LISTENER, FutexWait, ProcessView, ThreadView
from torchmedic.records.stall import Peer, Stall
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.proc import open_files, sleeps
from torchmedic.supervise.proc.process import compilers

_SLEEPS = ("clock_nanosleep", "nanosleep")


@linux_only
@pytest.mark.parametrize(
    ("source", "calls", "least", "most"),
    [
        ("import time; time.sleep(300)", _SLEEPS, 200, 300),
        ("import threading; threading.Event().wait(300)", ("futex",), 200, 300),
        ("import os; os.execvp('sleep', ['sleep', '300'])", _SLEEPS, 300, 300),
        ("import threading; threading.Event().wait()", ("futex",), None, None),
        ("import os; os.dup2(os.pipe()[0], 0); os.read(0, 1)", ("read",), None, None),
    ],
)
def test_when_a_sleep_ends(source: str, calls: tuple[str, ...], least: float | None, most: float | None) -> None:
    with child(source) as started:
        view = seen(started.pid, lambda view: _sleeps_in(view, calls))
        if not view.open_to_us:
            pytest.skip("system calls are hidden from us here")
        left = sleeps.with_sleeps(view).main
        assert left is not None
        if least is None or most is None:
            assert left.wakes_in is None
        else:
            assert left.wakes_in is not None
            assert least <= left.wakes_in <= most


def _sleeps_in(view: ProcessView, calls: tuple[str, ...]) -> bool:
    """And not in a read of what Python starts with."""
    main = view.main
    return main is not None and main.state == "S" and main.syscall in calls and main.arguments[0] != 3


def _sizes(pid: int) -> dict[str, int]:
    return {Path(path).name: size for (_, path), size in open_files.sizes([pid], Path("/nowhere")).items()}


@linux_only
def test_a_file_that_grows(tmp_path: Path) -> None:
    source = f"""
    import sys, time
    same = open({str(tmp_path / "same.pt")!r}, "wb")
    with open({str(tmp_path / "model.pt")!r}, "wb", buffering=0) as file:
        file.write(bytes(1000))
        while sys.stdin.read(1):
            file.write(bytes(500))
            print(flush=True)
    """
    with child(source, stdin=-1, stdout=-1, bufsize=0) as started:
        view = seen(started.pid, lambda view: _sizes(view.pid).get("model.pt") == 1000)
        before = open_files.sizes([started.pid], tmp_path / "run")
        started.stdin.write(b"x")
        started.stdout.readline()
        after = open_files.sizes([started.pid], tmp_path / "run")
        view = msgspec.structs.replace(view, elapsed=2.0)
        (grown,) = open_files.with_growth([view], before, after)
        assert [(file.path, file.size, file.rate) for file in grown.growing] == [
            (str(tmp_path / "model.pt"), 1500, 250)
        ]
        ours = open_files.sizes([started.pid], tmp_path)
        assert not any(path.startswith(str(tmp_path)) for _, path in ours)


def test_compilers_of_the_driver_by_what_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text("7f00-7f01 r-xp 0 00:00 0  /usr/lib/libnvidia-ptxjitcompiler.so.1\n")
    assert compilers(7, proc=tmp_path) == ("libnvidia-ptxjitcompiler",)
    assert compilers(8, proc=tmp_path) == ()


def _pressure(tmp_path: Path, throttled: int) -> host_pressure.HostPressure:
    group, me = tmp_path / "groups", tmp_path / "proc" / "7"
    for folder in (group, me):
        folder.mkdir(parents=True, exist_ok=True)
    (me / "cgroup").write_text("0::/\n")
    (me / "status").write_text("Cpus_allowed_list:\t0-31\n")
    (group / "cpu.max").write_text("200000 100000\n")
    periods = f"nr_periods {100 + throttled}\nnr_throttled {throttled}\nthrottled_usec 0\n"
    (group / "cpu.stat").write_text(periods)
    return host_pressure.read(7, proc=tmp_path / "proc", groups=group, shm=tmp_path)


def test_a_group_that_has_used_up_its_cpu(tmp_path: Path) -> None:
    before, after = _pressure(tmp_path, 0), _pressure(tmp_path, 80)
    known: dict[str, Any] = {"host": after, "pressure": host_pressure.difference(before, after)}
    rows = tuple(ThreadView(tid=PID + number, demand=1.0, busy=0.2) for number in range(8))
    crowded = msgspec.structs.replace(process(), threads=rows)
    found = asked("cpu_throttled", stall(thread(user(), moved=True), crowded, **known))
    assert found is not None
    assert found.severity == "warning"
    assert "8 threads want to run, and the CPU limit allows 2" in found.message
    assert "expect about 4.0 times as long as with a core for every thread" in found.evidence
    assert asked("cpu_throttled", stall(thread(user()), process(), **known)) is None, "it wants no CPU"
    calm = {**known, "pressure": host_pressure.difference(before, _pressure(tmp_path, 0))}
    assert asked("cpu_throttled", stall(thread(user(), moved=True), crowded, **calm)) is None


def test_a_native_call_becomes_a_warning_when_it_takes_very_long() -> None:
    call = thread(user(code="torch.linalg.svd(x)"))
    for still, severity in ((5.0, "note"), (590.0, "note"), (700.0, "warning")):
        found = asked("long_work", stall(call, process(demand=1.0), still=still))
        assert found is not None
        assert found.severity == severity
    assert asked("long_work", stall(call, process())) is None, "it stands, and nobody is at work"


def _mute(main: dict[str, Any], other: dict[str, Any], ours: dict[str, Any]) -> Stall:
    """A process that does not answer: its main thread, one that wants the GIL, and ours, which wants it as well."""
    names = {"main": main, "other": other, LISTENER: ours}
    rows = tuple(ThreadView(tid=PID + each, name=name, **names[name]) for each, name in enumerate(names))
    futexes = tuple(FutexWait(tid=row.tid, timed=True) for row in rows if row.syscall == "futex")
    own = ProcessView(pid=PID, state="S", threads=rows, futexes=futexes, elapsed=1.3, busy=0.0)
    waits = PyThread(ident=2, tid=PID + 1, frames=(user(30, "self.seconds += 0.1"),))
    view = msgspec.structs.replace(inside(thread(user(7, "libc.pause()"))), by_signal=True)
    view = msgspec.structs.replace(view, threads=(*view.threads, waits))
    return msgspec.structs.replace(stall(thread(user()), own), mute=(PID,), inside={PID: view})


_ASKS = {"state": "S", "syscall": "futex", "wakes": 200.0, "busy": 0.004, "demand": 0.01}
_ASKS_IN_A_CROWD = {"state": "R", "syscall": "running", "wakes": 40.0, "busy": 0.001, "demand": 0.8}
_WAITS_FOR_EVER = {"state": "S", "syscall": "pause", "wakes": 0.0, "busy": 0.0, "demand": 0.0}
_WORKS_IN_A_CROWD = {"state": "R", "syscall": "running", "wakes": 60.0, "busy": 0.2, "demand": 1.0}


@pytest.mark.parametrize("asks", [_ASKS, _ASKS_IN_A_CROWD, {**_ASKS, "wakes": 30.0, "demand": 0.7}])
@pytest.mark.parametrize(("holds", "severity"), [(_WAITS_FOR_EVER, "error"), (_WORKS_IN_A_CROWD, "warning")])
def test_who_holds_the_gil_is_known_on_a_machine_that_is_taken(
    holds: dict[str, Any], severity: str, asks: dict[str, Any]
) -> None:
    found = asked("gil_held_by_native_code", _mute(holds, asks, asks))
    assert found is not None
    assert found.cause_location is not None
    assert (found.cause_location.line, found.severity) == (7, severity)


def test_a_thread_of_ours_that_got_no_core_says_nothing_of_the_gil() -> None:
    starved = {**_ASKS_IN_A_CROWD, "wakes": 3.0}
    assert asked("gil_held_by_native_code", _mute(_WORKS_IN_A_CROWD, _ASKS, starved)) is None


def test_who_gets_no_core_is_not_said_to_hold_the_gil() -> None:
    starved = {"state": "R", "syscall": "running", "wakes": 5.0, "busy": 0.02, "demand": 1.0}
    assert asked("gil_held_by_native_code", _mute(starved, _ASKS, _ASKS)) is None


def test_our_own_thread_may_still_be_at_the_question_before() -> None:
    assert asked("gil_held_by_native_code", _mute(_WAITS_FOR_EVER, _ASKS, _WORKS_IN_A_CROWD)) is None


def test_a_compiler_that_does_nothing_is_no_reason() -> None:
    waiting = thread(library("torch/_inductor/async_compile.py", "wait"), user(3, "model(x)"))
    busy, idle = (
        msgspec.structs.replace(
            process(101, demand=demand), command=("python", "/x/torch/_inductor/compile_worker/__main__.py")
        )
        for demand in (0.9, 0.0)
    )
    found = asked("compiling", stall(waiting, children=(busy,)))
    assert found is not None
    assert found.severity == "note"
    assert asked("compiling", stall(waiting, children=(idle,))) is None
    locked = thread(
        library("torch/utils/file_baton.py", "wait"), library("torch/utils/cpp_extension.py", "load"), user()
    )
    assert asked("compiling", stall(locked, process(demand=1.0))) is None, "it waits for a lock"


_FETCH = library("torch/utils/data/_utils/fetch.py", "fetch")
_WAITS = thread(library("torch/utils/data/dataloader.py", "_try_get_data"), user(20, "for x in loader"))


def _reading(left: float | None, **fields: Any) -> Stall:
    worker = process(101, name="pt_data_worker", syscall="clock_nanosleep", wakes_in=left, asleep=5.0, **fields)
    view = inside(thread(user(4, "time.sleep(n)"), _FETCH, user(20)), pid=101, item="13")
    return stall(_WAITS, children=(worker,), others={101: view})


def test_a_worker_that_sleeps_a_little_is_slow_and_one_that_sleeps_for_an_hour_is_stuck() -> None:
    slow = asked("slow_data", _reading(3.0))
    assert slow is not None
    assert slow.severity == "note"
    assert slow.cause_location is not None
    assert slow.cause_location.line == 4
    assert asked("worker_stuck", _reading(3.0)) is None
    assert asked("slow_data", _reading(3600.0)) is None
    stuck = asked("worker_stuck", _reading(3600.0))
    assert stuck is not None
    assert stuck.severity == "error"


def test_only_the_holder_of_a_lock_counts_as_one_that_is_waited_for() -> None:
    lock = LockView(identity=5, kind="lock", name="lock")
    main = thread(user(), waits_for=lock)

    def other(**fields: Any) -> PyThread:
        return PyThread(ident=2, tid=102, name="saver", frames=(user(30),), samples=("1", "2"), **fields)

    def seen_with(thread_: PyThread) -> Stall:
        whole = stall(main)
        view = msgspec.structs.replace(whole.inside[PID], threads=(main, thread_))
        return msgspec.structs.replace(whole, inside={PID: view})

    note = asked("long_work", seen_with(other(holds=(lock,))))
    assert note is not None
    assert note.cause_location is not None
    assert note.cause_location.line == 30
    assert asked("long_work", seen_with(other())) is None, "a thread that has nothing to do with it"


@pytest.mark.parametrize(("wakes", "note"), [(150.0, True), (1.0, False), (0.0, False), (None, False)])
def test_a_thread_that_wakes_again_and_again_goes_on_though_it_is_always_seen_in_its_nap(
    wakes: float | None, note: bool
) -> None:
    main = thread(user(27, "thread.join()"), waits_for=LockView(identity=5, kind="thread", name="thread", owner=2))
    naps = PyThread(ident=2, tid=102, frames=(user(14, "time.sleep(0.005)"),), samples=("1", "1", "1"))
    whole = stall(main)
    own = whole.processes[0]
    rows = (*own.threads, ThreadView(tid=102, state="R", syscall="running", busy=0.06, demand=0.06, wakes=wakes))
    seen = msgspec.structs.replace(
        whole,
        processes=(msgspec.structs.replace(own, threads=rows),),
        inside={PID: msgspec.structs.replace(whole.inside[PID], threads=(main, naps))},
    )
    found = asked("sleeping_on_purpose", seen)
    assert (found is not None) is note
    if found is not None:
        assert (found.severity, found.cause_location and found.cause_location.line) == ("note", 14)


@pytest.mark.parametrize(("left", "severity"), [(3.0, "note"), (60.0, None)])
def test_a_wait_that_expires_much_later_is_as_good_as_none(left: float, severity: str | None) -> None:
    event = LockView(identity=5, kind="event", name="done")
    found = asked(
        "sleeping_on_purpose", stall(thread(user(), waits_for=event), process(syscall="futex", wakes_in=left))
    )
    assert (found.severity if found is not None else None) == severity


def test_a_sleep_of_the_script_itself_is_meant_however_long_it_is() -> None:
    found = asked("sleeping_on_purpose", stall(thread(user()), process(syscall="clock_nanosleep", wakes_in=3600.0)))
    assert found is not None
    assert found.severity == "note"
    assert "it continues by itself in 60 min" in found.evidence


_GATHERS = thread(library("torch/distributed/distributed_c10d.py", "all_reduce"), user(9, "dist.all_reduce(x)"))


def _rank(number: int, main: PyThread, updates: int | None = 4, **fields: Any) -> Peer:
    view = inside(main, pid=200 + number, job=JobView(backend="gloo", rank=number, world_size=2))
    return Peer(process=process(200 + number, **fields), inside=view, updates=updates, asked=True)


@pytest.mark.parametrize(
    ("peers", "severity", "line", "words"),
    [
        ((_rank(1, thread(user(30), moved=True), updates=40),), "error", 9, "rank 1 has continued without this call"),
        ((_rank(1, thread(user(30)), updates=3, demand=1.0),), "note", 30, "rank 1 is at work"),
        ((_rank(1, thread(user(30)), updates=3, syscall="clock_nanosleep"),), "note", 30, "rank 1 sleeps"),
        ((_rank(1, _GATHERS),), "error", 9, "all ranks wait"),
        ((_rank(1, thread(user(30))),), "error", 30, "the other ranks wait for rank 1, which stands"),
        ((_rank(1, thread(user(30), moved=True), updates=3, syscall="clock_nanosleep"),), "note", 30, "rank 1 polls"),
        ((Peer(process=process(201), asked=True),), "note", 9, ""),
        ((), "note", 9, "1 of 2 ranks are not on this host"),
    ],
)
def test_a_rank_that_waits(peers: tuple[Peer, ...], severity: str, line: int, words: str) -> None:
    job = JobView(backend="gloo", rank=0, world_size=2)
    found = asked("waits_for_collective", stall(_GATHERS, view={"job": job}, peers=peers, box=box(updates=4)))
    assert found is not None
    assert found.severity == severity
    assert words in found.cause
    assert found.cause_location is not None
    assert found.cause_location.line == line


@pytest.mark.parametrize(("still", "severity", "rank"), [(5.0, "note", 0), (30.0, "error", 1)])
def test_a_rank_that_polls_while_all_others_wait_for_it(still: float, severity: str, rank: int) -> None:
    peer = _rank(1, thread(user(30), moved=True), updates=3, syscall="clock_nanosleep")
    job = JobView(backend="gloo", rank=0, world_size=2)
    found = asked(
        "waits_for_collective", stall(_GATHERS, view={"job": job}, peers=(peer,), box=box(updates=4), still=still)
    )
    assert found is not None
    assert (found.severity, found.rank) == (severity, rank)


@pytest.mark.parametrize(
    ("still", "environment", "severity"),
    [
        (5.0, {}, "note"),
        (30.0, {}, "error"),
        (5.0, {"MASTER_ADDR": "127.0.0.1"}, "error"),
        (5.0, {"MASTER_ADDR": "10.0.0.7"}, "note"),
        (5.0, {"MASTER_ADDR": "10.0.0.7", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "error"),
    ],
)
def test_ranks_that_cannot_be_seen_may_be_on_other_hosts(
    still: float, environment: dict[str, str], severity: str
) -> None:
    own = process(environment=environment)
    for view in ({"job": JobView(backend="gloo", rank=0, world_size=2)}, {}):
        found = asked("waits_for_collective", stall(_GATHERS, own, view=view, still=still))
        assert found is not None
        assert found.severity == ("error" if not view and not environment else severity)


_JOINS = thread(library("torch/distributed/distributed_c10d.py", "init_process_group"), user(9, "init_process_group()"))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ((), "2 of 3 ranks have not come: 1, 2"),
        (((1, "gloo"),), "1 of 3 ranks has not come: 2"),
        (((2, "nccl"),), "the ranks join with different backends: rank 0 with gloo, rank 2 with nccl"),
    ],
)
def test_a_job_that_does_not_begin(others: tuple[tuple[int, str], ...], words: str) -> None:
    def joining(rank: int, backend: str) -> JobView:
        return JobView(backend=backend, rank=rank, world_size=3)

    peers = [
        Peer(process=process(200 + rank), inside=inside(_JOINS, pid=200 + rank, joining=joining(rank, backend)))
        for rank, backend in others
    ]
    found = asked("waits_for_collective", stall(_JOINS, view={"joining": joining(0, "gloo")}, peers=tuple(peers)))
    assert found is not None
    assert found.cause == words


@pytest.mark.parametrize(("condition", "line"), [("True", 7), ("not ready", 5)])
def test_a_sleep_between_two_tries_is_not_said_to_be_no_hang(condition: str, line: int) -> None:
    loop = LoopView(file="/home/me/train.py", line=5, end_line=9, code=condition, kind="while")
    main = thread(user(7, "time.sleep(0.5)"), moved=True)
    found = asked(
        "sleeping_on_purpose", stall(main, process(syscall="clock_nanosleep", wakes_in=0.4), view={"loop": loop})
    )
    assert found is not None
    assert found.message.startswith("the script sleeps in a loop")
    assert found.cause_location is not None
    assert found.cause_location.line == line
