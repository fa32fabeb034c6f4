"""Who waits for whom: verdicts that hang on what the others do, and such that no test can bring about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from stalls import PID, asked, inside, library, process, stall, thread, user

from torchmedic.records.host import HostPressure, PressureRates
from torchmedic.records.inside import EndedThread, InsideView, LockFile, LockView, PyFrame, PyThread
from torchmedic.records.process import FileWait, LockHeld, ProcessView, ThreadView
from torchmedic.records.stall import Stall

OTHER = 200
PARENT = 50
WAITS = thread(user())


def _read(**fields: Any) -> FileWait:
    return FileWait(tid=PID, action="read", descriptor=0, target="pipe:[1]", peers=(OTHER,), **fields)


def _write(**fields: Any) -> FileWait:
    return FileWait(tid=PID, action="write", descriptor=1, target="pipe:[1]", **{"peers": (OTHER,), **fields})


def _outsider(pid: int = OTHER, *, state: str = "S", arguments: tuple[int, ...] = (), **fields: Any) -> ProcessView:
    view = process(pid, **fields)
    rows = tuple(msgspec.structs.replace(row, arguments=arguments) for row in view.threads)
    return msgspec.structs.replace(view, state=state, threads=rows)


def _verdict(rule: str, seen: Stall) -> tuple[str, str] | None:
    found = asked(rule, seen)
    return None if found is None else (found.severity, found.grade)


@pytest.mark.parametrize(
    ("other", "above", "verdict"),
    [
        (_outsider(syscall="wait4"), (OTHER,), ("error", "proven")),  # it waits for the run to end
        (_outsider(state="T"), (), ("error", "proven")),
        (_outsider(syscall="clock_nanosleep", wakes_in=3.0), (), ("note", "likely")),
        (_outsider(demand=1.0), (), ("note", "likely")),
        (_outsider(syscall="futex"), (), ("warning", "likely")),
    ],
)
def test_who_waits_for_input_depends_on_the_writer(
    other: ProcessView, above: tuple[int, ...], verdict: tuple[str, str]
) -> None:
    own = process(syscall="read", files=(_read(),))
    assert _verdict("waiting_for_input", stall(WAITS, own, outsiders=(other,), above=above)) == verdict


def test_a_pipe_out_of_a_container_has_no_writer_that_can_be_seen() -> None:
    hidden = process(syscall="read", files=(msgspec.structs.replace(_read(), peers=()),))
    assert _verdict("waiting_for_input", stall(WAITS, hidden, still=3.0)) == ("note", "likely")
    assert _verdict("waiting_for_input", stall(WAITS, hidden)) == ("warning", "likely")
    asks = thread(user(code="input('go on? ')"))
    assert _verdict("waiting_for_input", stall(asks, hidden)) == ("error", "likely")


def test_a_debugger_waits_for_a_person_whoever_has_the_pipe() -> None:
    main = thread(library("../pdb.py", "cmdloop"), user())
    other = _outsider(syscall="clock_nanosleep", wakes_in=3.0)
    seen = stall(main, process(syscall="read", files=(_read(),)), outsiders=(other,))
    assert _verdict("waiting_for_input", seen) == ("error", "proven")


def test_a_read_of_a_file_is_no_question() -> None:
    file = FileWait(tid=PID, action="read", descriptor=0, target="/data/train.bin")
    assert _verdict("waiting_for_input", stall(WAITS, process(syscall="read", files=(file,)))) is None


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (_outsider(state="T"), ("error", "proven")),
        (_outsider(syscall="clock_nanosleep", wakes_in=900.0), ("note", "likely")),
        (_outsider(syscall="futex"), ("warning", "likely")),
    ],
)
def test_output_that_is_not_read_depends_on_the_reader(other: ProcessView, verdict: tuple[str, str]) -> None:
    own = process(syscall="write", files=(_write(),))
    assert _verdict("output_not_drained", stall(WAITS, own, outsiders=(other,))) == verdict


def test_torchmedic_itself_passes_output_on_and_names_who_does_not_take_it() -> None:
    pump = FileWait(tid=PARENT, action="write", descriptor=2, target="pipe:[2]", peers=(OTHER,))
    parent = _outsider(PARENT, syscall="write", files=(pump,))
    own = process(syscall="write", files=(_write(peers=(PARENT,)),))
    reader = msgspec.structs.replace(_outsider(state="T"), command=("less", "log"))
    found = asked("output_not_drained", stall(WAITS, own, outsiders=(parent, reader), above=(PARENT,)))
    assert found is not None
    assert any("less log" in fact and "stopped" in fact for fact in found.evidence), found.evidence


@pytest.mark.parametrize(
    ("holder", "lives", "other", "verdict"),
    [
        (PID, True, None, ("error", "proven")),
        (OTHER, True, _outsider(syscall="wait4"), ("error", "proven")),  # and it waits for the run
        (OTHER, True, _outsider(demand=1.0), ("note", "likely")),
        (OTHER, False, _outsider(syscall="futex"), ("error", "likely")),
    ],
)
def test_a_lock_on_a_file_depends_on_its_holder(
    holder: int, lives: bool, other: ProcessView | None, verdict: tuple[str, str]
) -> None:
    lock = LockHeld(kind="flock", path="/data/.lock", holder=holder, holder_lives=lives, tid=PID, age=40.0)
    own = process(syscall="flock", locks=(lock,))
    seen = stall(WAITS, own, outsiders=(other,) if other is not None else (), above=(OTHER,))
    assert _verdict("file_lock_held", seen) == verdict


@pytest.mark.parametrize(
    ("file", "severity"),
    [
        (LockFile(path="/data/a.lock", age=9.0, writer=7, writer_lives=False), "error"),
        (LockFile(path="/data/a.lock", age=9.0, writer=7, writer_lives=True), "note"),
        (LockFile(path="/data/a.lock", age=9e6), "error"),  # older than the run
        (LockFile(path="/data/a.lock", age=9e6, by_kernel=True), "warning"),
        (LockFile(path="/data/a.lock", age=1.0), "note"),
    ],
)
def test_a_lock_file_is_stale_if_whoever_made_it_is_gone(file: LockFile, severity: str) -> None:
    main = thread(user(), moved=True, lock_file=file)
    own = process(syscall="clock_nanosleep", wakes_in=0.1, started=10.0)
    view = InsideView(pid=PID, time=1000.0, threads=(main,))
    found = asked("file_lock_held", Stall(pid=PID, still=5.0, limit=2.0, processes=(own,), inside={PID: view}))
    assert found is not None
    assert found.severity == severity


def _in_kernel(**fields: Any) -> ProcessView:
    wchan = fields.pop("wchan", "rpc_wait_bit_killable")
    view = process(**{"bytes_read": 0.0, "bytes_written": 0.0, **fields})
    row = msgspec.structs.replace(view.threads[0], state="D", wchan=wchan)
    return msgspec.structs.replace(view, state="D", threads=(row,))


def test_storage_that_does_not_answer_is_told_from_one_that_is_slow() -> None:
    assert _verdict("storage_or_network_wait", stall(WAITS, _in_kernel(), still=3.0)) == ("warning", "likely")
    assert _verdict("storage_or_network_wait", stall(WAITS, _in_kernel())) == ("error", "likely")
    assert _verdict("storage_or_network_wait", stall(WAITS, _in_kernel(bytes_read=5e6))) is None
    assert _verdict("storage_or_network_wait", stall(WAITS, _in_kernel(wchan="kernel_clone"))) is None


def test_processes_that_start_cuda_at_the_same_time_wait_for_each_other_in_the_driver() -> None:
    waits = _in_kernel(wchan="os_acquire_rwlock_write")
    assert _verdict("storage_or_network_wait", stall(WAITS, waits)) == ("note", "likely")
    assert _verdict("storage_or_network_wait", stall(WAITS, waits, still=90.0)) == ("error", "likely")
    assert _verdict("storage_or_network_wait", stall(WAITS, waits, still=90.0, limit=60.0)) == ("note", "likely")


def test_a_server_elsewhere_is_given_some_time() -> None:
    wait = FileWait(tid=PID, action="read", descriptor=5, target="tcp", remote="10.0.0.2:80", connection="ESTABLISHED")
    own = process(syscall="recvfrom", files=(wait,), asleep=9.0)
    assert _verdict("storage_or_network_wait", stall(WAITS, own, still=3.0)) == ("note", "likely")
    assert _verdict("storage_or_network_wait", stall(WAITS, own)) == ("error", "likely")
    comes_in_pieces = process(syscall="recvfrom", files=(wait,), asleep=0.4)
    assert _verdict("storage_or_network_wait", stall(WAITS, comes_in_pieces)) is None
    limited = msgspec.structs.replace(own, files=(msgspec.structs.replace(wait, action="poll", timed=True),))
    assert _verdict("storage_or_network_wait", stall(WAITS, limited)) is None


def test_the_main_process_can_be_the_one_that_is_stopped() -> None:
    seen = Stall(pid=PID, still=5.0, limit=2.0, processes=(_outsider(PID, state="T"),), mute=(PID,))
    assert _verdict("stopped_process", seen) == ("error", "proven")


def test_a_child_that_works_or_sleeps_is_waited_for() -> None:
    own = process(syscall="wait4")
    for other, verdict in (
        (process(OTHER, syscall="futex", parent=PID), ("error", "likely")),
        (process(OTHER, demand=1.0, parent=PID), None),
        (process(OTHER, syscall="clock_nanosleep", wakes_in=50.0, parent=PID), None),
    ):
        assert _verdict("waits_for_child_process", stall(WAITS, own, children=(other,))) == verdict


def test_what_a_function_held_is_freed_after_the_end_of_the_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n    train()\n    dist.destroy_process_group()\nmain()\nother()\n")
    for line, where in ((4, [3, 4]), (5, [5])):
        frame = PyFrame(file=str(script), line=line, function="<module>", user=True)
        own = process(syscall="futex")
        seen = Stall(pid=PID, still=5.0, limit=2.0, processes=(own,), inside={PID: inside(thread(frame))}, mute=(PID,))
        found = asked("gil_held_by_native_code", seen)
        assert found is not None
        assert sorted(each.line for each in found.locations) == where
        assert found.cause_location is not None
        assert found.cause_location.line == where[0]


def _event(**fields: Any) -> LockView:
    return LockView(identity=5, kind="event", name="ready", timed=False, **fields)


def _beside(waits_for: LockView | None, *frames: Any, **row: Any) -> tuple[PyThread, ThreadView]:
    python = PyThread(ident=2, tid=101, name="loader", frames=frames, samples=("a", "a"), waits_for=waits_for)
    return python, ThreadView(tid=101, state="S", **row)


def _together(main: PyThread, other: tuple[PyThread, ThreadView], **fields: Any) -> Stall:
    own = process(syscall="futex", **fields)
    own = msgspec.structs.replace(own, threads=(*own.threads, other[1]))
    view = msgspec.structs.replace(inside(main), threads=(main, other[0]))
    return Stall(pid=PID, still=5.0, limit=2.0, processes=(own,), inside={PID: view})


def test_nobody_is_left_only_if_all_others_wait_in_the_same_way() -> None:
    main = thread(user(), waits_for=_event())
    alone = stall(main, process(syscall="futex"))
    assert _verdict("nobody_left_to_signal", alone) == ("error", "proven")
    waits_too = _beside(_event(), user(20), syscall="futex")
    assert _verdict("nobody_left_to_signal", _together(main, waits_too)) == ("error", "proven")
    bar = _beside(_event(), library("tqdm/_monitor.py", "run"), syscall="futex", wakes_in=9.0)
    assert _verdict("nobody_left_to_signal", _together(main, bar)) == ("error", "proven")
    idle_pool = _beside(LockView(identity=6, kind="queue get", name="q"), library("thread.py", "_worker"))
    assert _verdict("nobody_left_to_signal", _together(main, idle_pool)) == ("error", "proven")
    for could in (
        _beside(None, user(20), syscall="clock_nanosleep", wakes_in=9.0),
        _beside(None, user(20), syscall="recvfrom"),
        _beside(_event(), user(20), syscall="futex", wakes_in=9.0),
        _beside(None, library("requests.py", "get"), busy=0.6),
    ):
        assert _verdict("nobody_left_to_signal", _together(main, could)) is None
    timer = _beside(_event(), library("../threading.py", "run"), syscall="futex", wakes_in=9.0)
    assert _verdict("nobody_left_to_signal", _together(main, timer)) == ("note", "possible")


def test_a_thread_that_waits_with_a_lock_in_its_hands_keeps_away_who_would_end_the_wait() -> None:
    lock = LockView(identity=8, kind="lock", name="guard", timed=False)
    taken = LockView(identity=8, kind="lock", name="guard", file="/home/me/train.py", line=6)
    main = thread(user(), waits_for=_event(), holds=(taken,))
    found = asked("thread_deadlock", _together(main, _beside(lock, user(20), syscall="futex")))
    assert found is not None
    assert (found.grade, found.cause_location and found.cause_location.line) == ("proven", 7)
    for other in (
        _beside(_event(), user(20), syscall="futex"),  # it does not need the lock
        _beside(lock, user(20), syscall="futex", wakes_in=9.0),  # it gives up
    ):
        assert _verdict("thread_deadlock", _together(main, other)) is None
    free = thread(user(), waits_for=_event())
    assert _verdict("thread_deadlock", _together(free, _beside(lock, user(20), syscall="futex"))) is None


@pytest.mark.parametrize(("signals", "line", "told"), [("ready", 2, 2), ("other", 2, 7), ("ready", 0, 7)])
def test_the_exception_of_a_thread_that_would_have_signalled(
    tmp_path: Path, signals: str, line: int, told: int
) -> None:
    file = tmp_path / "work.py"
    file.write_text(f"def work():\n    check()\n    {signals}.set()\n")
    ended = EndedThread(name="w", target="work", file=str(file), line=1, error_file=str(file), error_line=line)
    wanted = msgspec.structs.replace(_event(), name="self.ready")
    main = thread(user(), waits_for=wanted)
    found = asked("nobody_left_to_signal", stall(main, process(syscall="futex"), view={"ended_threads": (ended,)}))
    assert found is not None
    assert found.cause_location is not None
    assert found.cause_location.line == told


def test_a_handler_of_a_signal_may_end_a_wait() -> None:
    usr1 = 1 << 9
    seen = stall(thread(user(), waits_for=_event()), process(syscall="futex", caught_signals=usr1))
    assert _verdict("nobody_left_to_signal", seen) == ("note", "likely")


def test_a_time_limit_is_no_standstill() -> None:
    timed = msgspec.structs.replace(_event(), timed=True)
    assert _verdict("nobody_left_to_signal", stall(thread(user(), waits_for=timed), process(syscall="futex"))) is None
    put = LockView(identity=5, kind="queue put", name="q", timed=True, count=2, room=2)
    assert _verdict("queue_not_drained", stall(thread(user(), waits_for=put), process(syscall="futex"))) is None


def test_a_host_that_swaps() -> None:
    rates = PressureRates(seconds=1.3, memory_full=0.6, swap_in=50e6, major_faults=900.0)
    host = HostPressure(time=1.0, memory_total=16 << 30, memory_available=80 << 20)
    found = asked("swap_thrash", stall(thread(user(), moved=True), pressure=rates, host=host))
    assert found is not None
    assert (found.severity, found.grade) == ("warning", "likely")
    for calm in (
        msgspec.structs.replace(rates, memory_full=0.01),
        msgspec.structs.replace(rates, swap_in=0.0, major_faults=3.0),
    ):
        assert _verdict("swap_thrash", stall(WAITS, pressure=calm)) is None


def test_an_allocator_that_gives_all_back_again_and_again() -> None:
    def seen(rate: float | None) -> Stall:
        return stall(WAITS, view={"allocator_retries": 400, "allocator_retry_rate": rate})

    assert _verdict("stalled_by_allocator", seen(12.0)) == ("warning", "likely")
    assert _verdict("stalled_by_allocator", seen(0.0)) is None
    assert _verdict("stalled_by_allocator", seen(None)) is None
