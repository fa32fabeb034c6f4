"""The host's memory as the parent sees it: on files of its own, never on a machine that is really full."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from torchmedic.detect.trends.host_memory import is_alarming, is_rushing, is_tight, rises, seconds_left
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask
from torchmedic.records import BoxContents, Diagnosis, Location
from torchmedic.records.death import Death
from torchmedic.records.memory import HeldMemory, HostAlarm, MemorySample
from torchmedic.runfolder import questions
from torchmedic.supervise import memory_warnings
from torchmedic.supervise.host.memory_guard import MemoryGuard

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")


def samples(*used: float, every: float = 1.0, waiting: float = 0.0, swap_in: float = 0.0) -> tuple[MemorySample, ...]:
    return tuple(
        MemorySample(
            time=number * every,
            used=int(each * GIB),
            limit=GIB,
            bound="cgroup",
            private={7: int(each * GIB)},
            waiting=waiting,
            swap_in=swap_in,
        )
        for number, each in enumerate(used)
    )


def test_the_time_that_is_left_follows_from_the_last_seconds() -> None:
    assert seconds_left(samples(0.5, 0.6, 0.7, 0.8)) == pytest.approx(2.0, rel=1e-3)
    assert seconds_left(samples(0.8, 0.8, 0.8, 0.8)) is None
    assert seconds_left(samples(0.5, 0.8)) is None
    assert seconds_left(samples(0.5, 0.7, 0.8, 0.8, 0.8, 0.8)) is None  # it has stopped
    wide, close = samples(0.3, 0.4, 0.5, 0.6, 0.7), samples(*(0.7 + each * 0.02 for each in range(10)), every=0.2)
    mixed = (*wide, *(msgspec.structs.replace(each, time=each.time + 4.0) for each in close[1:]))
    assert seconds_left(mixed) == pytest.approx(1.2, rel=1e-2)  # measured more often as it got tight


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (samples(0.6, 0.7, 0.8, 0.9), True),
        (samples(0.5, 0.6, 0.7, 0.8), False),  # there is room
        (samples(0.94, 0.94, 0.95, 0.95, 0.95), False),  # much is used, and all is well
        (samples(0.895, 0.9, 0.905, 0.91, 0.915, every=20), False),  # minutes are left
        (samples(0.9, 0.9, 0.9, 0.9, waiting=60.0), True),  # nobody gets on
        (samples(0.5, 0.5, 0.5, 0.5, waiting=60.0), False),  # for want of something else
    ],
)
def test_what_is_alarming(seen: tuple[MemorySample, ...], expected: bool) -> None:
    assert is_alarming(seen) is expected


def test_memory_that_is_at_rest_is_looked_at_rarely() -> None:
    assert not is_tight(samples(0.8, 0.8, 0.801, 0.8))
    assert is_tight(samples(0.8, 0.8, 0.8, 0.81))  # it moves
    assert is_tight(samples(0.8, 0.8, waiting=5.0))
    assert is_tight(samples(0.9, 0.9))  # a moment may be enough
    assert not is_tight(samples(0.3, 0.31))
    assert is_tight(samples(0.3, 0.6))


def machine(folder: Path, *, pages: int, limit: int, held: int | None = None) -> tuple[Path, Path]:
    """A host with one process, and its cgroup."""
    proc, group = folder / "proc", folder / "cgroup" / "job"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "7").mkdir(exist_ok=True)
    group.mkdir(parents=True, exist_ok=True)
    (proc / "meminfo").write_text("MemTotal:       67108864 kB\nMemAvailable:   66000000 kB\n")
    (proc / "vmstat").write_text("pswpin 0\n")
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "7" / "statm").write_text(f"{pages} {pages} 0 0 0 0 0\n")
    (group / "memory.max").write_text(f"{limit}\n")
    if held is not None:
        (group / "memory.stat").write_text(f"anon {held}\nfile {limit - held}\nshmem 0\n")
    return proc, folder / "cgroup"


def test_a_young_run_is_looked_at_often_unless_much_memory_is_left(tmp_path: Path) -> None:
    guard = MemoryGuard(tmp_path)
    assert guard.pause < 0.5  # nothing is known yet
    guard._samples.append(samples(0.1)[0])
    assert guard.pause < 0.5  # a small limit
    guard._samples.append(msgspec.structs.replace(samples(8.0)[0], limit=24 * GIB))
    assert guard.pause == 1.0
    guard._samples.append(msgspec.structs.replace(samples(13.0)[0], limit=24 * GIB))
    assert guard.pause < 0.5


def test_a_cache_of_files_is_no_use_of_memory(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, pages=1000, limit=GIB, held=GIB // 10)
    guard = MemoryGuard(tmp_path, proc, groups)
    guard.look([7])
    (sample,) = guard.samples
    assert (sample.bound, sample.used, sample.limit) == ("cgroup", GIB // 10, GIB)
    assert sample.private == {7: 1000 * PAGE}


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("rank0", "the process of the script has"),
        ("worker-0.7", "a DataLoader worker (process 7) has"),
        ("worker-0.6", "a DataLoader worker (process 7) has"),  # which does the same
    ],
)
def test_an_alarm_is_raised_once_with_the_process_and_its_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, who: str
) -> None:
    from torchmedic.supervise.host import memory_guard

    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "rank0").mkdir(exist_ok=True)
    holders = (
        b'{"kind":"holders","holders":[{"name":"seen","nbytes":800000000,"items":9,"file":"train.py","line":3}]}\n'
    )
    (folder / "events.jsonl").write_bytes(b'{"kind":"start","pid":7}\n' + holders)
    now = [100.0]
    monkeypatch.setattr(memory_guard.time, "monotonic", lambda: now[0])
    proc, groups = machine(tmp_path, pages=0, limit=GIB)
    (proc / "7" / "comm").write_text("pt_data_worker\n")
    guard = MemoryGuard(tmp_path, proc, groups)
    raised = []
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 0.92, 0.94):
        machine(tmp_path, pages=int(share * GIB / PAGE), limit=GIB)
        guard.look([7])
        raised += memory_warnings.new(guard)
        now[0] += 1.0
    (diagnosis,) = raised
    assert (diagnosis.code, diagnosis.severity, diagnosis.grade) == ("TM455", "warning", "likely")
    assert diagnosis.cause_location is not None
    assert (diagnosis.cause_location.file, diagnosis.cause_location.line) == ("train.py", 3)
    assert "`seen` holds 762.9 MiB in 9 items" in diagnosis.evidence
    assert who in diagnosis.cause


def test_an_answer_is_compared_with_the_size_that_the_process_had_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmedic.supervise.host import memory_guard

    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "events.jsonl").write_bytes(b'{"kind":"start","pid":7}\n')
    (tmp_path / questions.FOLDER).mkdir()
    now = [100.0]
    monkeypatch.setattr(memory_guard.time, "monotonic", lambda: now[0])
    proc, groups = machine(tmp_path, pages=0, limit=GIB)
    guard = MemoryGuard(tmp_path, proc, groups)
    raised = []
    for share in (0.3, 0.4, 0.7, 0.85, 0.95):
        machine(tmp_path, pages=int(share * GIB / PAGE), limit=GIB)
        guard.look([7])
        if share == 0.4:
            held = HeldMemory(name="seen", nbytes=GIB // 7, items=9, file="train.py", line=3)
            questions.write_held(tmp_path, 7, [held])
        if questions.read_held(tmp_path, 7):  # the file gets one second older in every turn, too
            age = time.time() - (now[0] - 101.0)
            os.utime(questions.held(tmp_path, 7), (age, age))
        raised += memory_warnings.new(guard)
        now[0] += 1.0
    (diagnosis,) = raised
    assert diagnosis.cause_location is not None
    assert (diagnosis.cause_location.file, diagnosis.cause_location.line) == ("train.py", 3)


def test_a_report_is_compared_with_the_size_that_the_process_had_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmedic.supervise.host import memory_guard

    (tmp_path / "rank0").mkdir()
    now = [100.0]
    monkeypatch.setattr(memory_guard.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory_guard.time, "time", lambda: 5000.0 + now[0])
    proc, groups = machine(tmp_path, pages=0, limit=GIB)
    guard = MemoryGuard(tmp_path, proc, groups)
    holders = f'{{"name":"seen","nbytes":{GIB // 7},"items":9,"file":"train.py","line":3}}'
    report = f'{{"kind":"holders","time":5101.0,"holders":[{holders}]}}\n'
    (tmp_path / "rank0" / "events.jsonl").write_text('{"kind":"start","pid":7}\n' + report)
    raised = []
    for share in (0.3, 0.4, 0.7, 0.85, 0.95):
        machine(tmp_path, pages=int(share * GIB / PAGE), limit=GIB)
        guard.look([7])
        raised += memory_warnings.new(guard)
        now[0] += 1.0
    (diagnosis,) = raised
    assert diagnosis.cause_location is not None
    assert (diagnosis.cause_location.file, diagnosis.cause_location.line) == ("train.py", 3)


def test_memory_that_others_use_is_not_blamed_on_the_run() -> None:
    seen = tuple(
        MemorySample(time=each.time, used=each.used, limit=GIB, private={7: 1000})
        for each in samples(0.6, 0.7, 0.8, 0.9)
    )
    diagnosis = ask(HostAlarm(samples=seen, seconds_left=2.0, growing=(7, 10)), registry.HOST)
    assert diagnosis is not None
    assert diagnosis.grade == "possible"
    assert "others" in diagnosis.cause


def test_a_death_is_explained_with_the_last_samples_and_the_holder() -> None:
    death = Death(
        pid=7,
        signal="SIGKILL",
        oom_kills=1,
        memory_limit=GIB,
        peak_rss=GIB,
        box=BoxContents(pid=7, started=0.0, clean_exit=False, moments=()),
        samples=samples(0.5, 0.6, 0.7, 0.8),
        holders=(HeldMemory(name="seen", nbytes=GIB // 2, items=9, file="train.py", line=3),),
    )
    diagnosis = ask(death, registry.DEATHS)
    assert diagnosis is not None
    assert (diagnosis.code, diagnosis.grade) == ("TM417", "proven")
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == 3
    assert any(
        "819.2 MiB of 1.0 GiB were in use, 307.2 MiB more than 3 s before" in each for each in diagnosis.evidence
    )


def test_many_processes_that_fill_the_limit_together_make_it_likely() -> None:
    seen = [MemorySample(time=0.0, used=int(0.95 * GIB), limit=GIB, bound="cgroup", private={7: GIB // 9, 8: GIB // 2})]
    death = Death(pid=7, signal="SIGKILL", memory_limit=GIB, peak_rss=GIB // 8, samples=tuple(seen))
    diagnosis = ask(death, registry.DEATHS)
    assert diagnosis is not None
    assert (diagnosis.code, diagnosis.grade) == ("TM417", "likely")


def test_a_warning_gives_way_to_what_came_of_it() -> None:
    def of(code: str, severity: str) -> Diagnosis:
        return Diagnosis(code=code, name="x", severity=severity, grade="likely", message="", cause="")  # type: ignore[arg-type]

    said = [of("TM601", "error"), of("TM450", "warning"), of("TM455", "warning")]
    first, last = memory_warnings.folded(said, of("TM806", "error"))
    assert (first.code, last.code) == ("TM601", "TM806")
    assert ["TM450" in each or "TM455" in each for each in last.evidence] == [True, True]
    for other in (of("TM201", "error"), of("TM452", "warning")):
        assert memory_warnings.folded(said, other) == [*said, other]


def test_a_warning_of_something_else_than_what_ended_stays() -> None:
    def of(code: str, severity: str, message: str, line: int) -> Diagnosis:
        place = Location(role="cause", file="train.py", line=line)
        return Diagnosis(
            code=code,
            name="x",
            severity=severity,  # type: ignore[arg-type]
            grade="proven",
            message=message,
            cause="",
            locations=(place,),
        )

    warnings = [of("TM450", "warning", "`self.seen['a']` keeps", 5), of("TM452", "warning", "`rows` holds", 9)]
    same_line = memory_warnings.folded(warnings, of("TM403", "error", "`t.x` keeps", 5))
    assert [each.code for each in same_line] == ["TM452", "TM403"]
    same_name = memory_warnings.folded(warnings, of("TM403", "error", "`trainer.seen` keeps", 6))
    assert [each.code for each in same_name] == ["TM452", "TM403"]
    assert [(each.role, each.line) for each in same_name[-1].locations] == [("cause", 6), ("holder", 5)]
    neither = memory_warnings.folded(warnings, of("TM406", "error", "one batch is too large", 7))
    assert [each.code for each in neither] == ["TM450", "TM452", "TM406"]


def test_the_guard_and_its_rule_do_not_import_torch() -> None:
    script = (
        "import sys; from torchmedic.diagnose import registry; registry.load(registry.HOST[0]); "
        "import torchmedic.supervise.memory_warnings; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def growing(*shares: float, every: float = 1.0, processes: int = 1) -> tuple[MemorySample, ...]:
    """Samples of a run whose processes fill all that is used, in equal parts, beside 100 MiB of somebody else's."""
    return tuple(
        MemorySample(
            time=number * every,
            used=int(share * GIB),
            limit=GIB,
            bound="cgroup",
            private={7 + each: (int(share * GIB) - (100 << 20)) // processes for each in range(processes)},
        )
        for number, share in enumerate(shares)
    )


def test_growth_that_leaves_no_time_is_seen_by_few_samples() -> None:
    fast = growing(0.3, 0.5, 0.7, 0.9, every=0.3)
    assert is_rushing(fast[:2])
    assert is_alarming(fast)
    assert not is_alarming(growing(0.85, 0.86, 0.87, 0.88, every=0.3))  # it may stop as well
    assert not is_rushing(growing(0.3, 0.31))


def test_processes_that_grow_alike_are_blamed_together() -> None:
    seen = growing(0.6, 0.7, 0.8, 0.9, processes=4)
    rise = rises(seen)[7]
    held = HeldMemory(name="self.cache", nbytes=rise, items=9, file="train.py", line=3)
    alarm = HostAlarm(
        samples=seen,
        seconds_left=1.0,
        growing=(7, rise),
        loads=True,
        together=4 * rise,
        alike=4,
        holders=(held, HeldMemory(name="environment", nbytes=2600)),
    )
    diagnosis = ask(alarm, registry.HOST)
    assert diagnosis is not None
    assert (diagnosis.grade, diagnosis.cause_location and diagnosis.cause_location.line) == ("likely", 3)
    assert "4 DataLoader workers have grown by 307.2 MiB together" in diagnosis.cause
    assert not any("environment" in fact for fact in diagnosis.evidence)
    assert "each has one of its own" in diagnosis.treatments[0].title


def test_what_lies_in_shared_memory_is_not_blamed_on_others() -> None:
    seen = tuple(
        MemorySample(
            time=each.time, used=each.used, limit=GIB, private={7: 1000}, shm_used=each.used, shm_size=64 * GIB
        )
        for each in growing(0.6, 0.7, 0.8, 0.9)
    )
    diagnosis = ask(HostAlarm(samples=seen, seconds_left=2.0, growing=(7, 10)), registry.HOST)
    assert diagnosis is not None
    assert "what lies in /dev/shm has grown by" in diagnosis.cause
    assert "others" not in diagnosis.cause


def test_a_process_that_grows_is_asked_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchmedic.runfolder import questions
    from torchmedic.supervise.host import memory_guard

    asked: list[tuple[int, bytes]] = []

    def answer(run: Path, pid: int, word: bytes) -> bool:
        asked.append((pid, word))
        questions.write_held(run, pid, [HeldMemory(name="rows", nbytes=GIB // 2, items=5, file="load.py", line=4)])
        return True

    (tmp_path / questions.FOLDER).mkdir()
    monkeypatch.setattr(questions, "ask", answer)
    now = [100.0]
    monkeypatch.setattr(memory_guard.time, "monotonic", lambda: now[0])
    proc, groups = machine(tmp_path, pages=0, limit=GIB)
    guard = MemoryGuard(tmp_path, proc, groups)
    raised = []
    for share in (0.3, 0.3, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        machine(tmp_path, pages=int(share * GIB / PAGE), limit=GIB)
        guard.look([7])
        raised += memory_warnings.new(guard)
        now[0] += 1.0
    (diagnosis,) = raised
    assert set(asked) == {(7, questions.HOLD)}
    assert diagnosis.cause_location is not None
    assert (diagnosis.cause_location.file, diagnosis.cause_location.line) == ("load.py", 4)
    assert "process 7, which the script has started, has grown" in diagnosis.cause
