"""Run folders: private, never overwritten, shared by the ranks of one job, readable when damaged."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from torchmedic.errors import UnreadableRun, UsageError
from torchmedic.records import Diagnosis, Location, Outcome, Report
from torchmedic.runfolder import events, files, layout
from torchmedic.settings import job_identity
from torchmedic.supervise.job import Ledger, merged, same_finding


def diagnosis(code: str = "TM151", rank: int = 0, line: int = 3) -> Diagnosis:
    place = Location(role="cause", file="train.py", line=line)
    return Diagnosis(code=code, name="x", grade="proven", message="m", cause="c", rank=rank, locations=(place,))


def test_a_folder_of_its_own_for_every_run(tmp_path: Path) -> None:
    folders = [layout.create(None, "jobs/my train.py", tmp_path) for _ in range(3)]

    assert len(set(folders)) == 3
    for folder in folders:
        assert folder.parent == tmp_path / ".torchmedic"
        assert "my-train" in folder.name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (tmp_path / ".torchmedic" / ".gitignore").read_text() == "*\n"


def test_a_requested_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    assert layout.create("empty", "a.py", tmp_path) == tmp_path / "empty"
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("full", "file", "file/below"):
        with pytest.raises(UsageError) as caught:
            layout.create(name, "a.py", tmp_path)
        assert "\n" not in str(caught.value)


def test_the_ranks_of_a_job_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: layout.create(None, "a.py", tmp_path, "job-1"), range(16)))
    assert len(folders) == 1
    assert layout.create(None, "a.py", tmp_path, "job-2") not in folders
    assert layout.create("out", "a.py", tmp_path, "job-1") == layout.create("out", "a.py", tmp_path, "job-1")
    with pytest.raises(UsageError):
        layout.create("out", "a.py", tmp_path, "job-2")


def test_a_folder_that_is_signed_between_two_looks_is_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.create("out", "a.py", tmp_path, "job-1")
    (tmp_path / "out" / "rank0").mkdir()
    looks = iter([None])
    read = layout._signature
    monkeypatch.setattr(layout, "_signature", lambda path: next(looks) if looks.__length_hint__() else read(path))
    assert layout.create("out", "a.py", tmp_path, "job-1") == tmp_path / "out"


def test_a_job_is_known_by_its_launcher() -> None:
    torchrun = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
    assert job_identity({}) is None
    assert job_identity({"WORLD_SIZE": "1"}) is None
    first = job_identity({**torchrun, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"})
    assert first == job_identity({**torchrun, "RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"})
    assert first != job_identity({**torchrun, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first is not None
    assert str(os.getppid()) in first


def test_one_report_of_several_ranks(tmp_path: Path) -> None:
    assert Ledger(tmp_path, 1).publish(Report(diagnoses=(diagnosis(rank=1),))) == frozenset()
    mine = Report(outcome=Outcome(exit_status=143, steps=7), diagnoses=())
    others = Ledger(tmp_path, 0).publish(mine)
    assert others == {same_finding(diagnosis())}

    Ledger(tmp_path, 1).publish(
        Report(outcome=Outcome(exit_status=1, symptom="exception"), diagnoses=(diagnosis(rank=1),))
    )

    report = files.read_report(tmp_path)
    assert report.outcome == Outcome(exit_status=1, steps=7, symptom="exception")
    assert [found.rank for found in report.diagnoses] == [1]


def test_the_message_of_a_diagnosis_names_the_rank_of_a_job(tmp_path: Path) -> None:
    died = replace(diagnosis(rank=1), code="TM805", name="killed", message="the process was killed")
    assert Ledger(tmp_path, None).shown(died).message == "the process was killed"
    named = Ledger(tmp_path, 1).shown(died)
    assert named.message == "rank 1: the process was killed"
    assert Ledger(tmp_path, 1).shown(named) == named
    waits = replace(died, message="ranks 0 and 2 wait for each other")
    assert Ledger(tmp_path, 1).shown(waits) == waits
    for number in (0, 1):
        (tmp_path / f"rank{number}").mkdir()
    assert Ledger(tmp_path, None).shown(died) == named, "torchmedic around a launcher"


def test_a_job_without_findings_ends_as_its_worst_rank() -> None:
    parts = [Report(outcome=Outcome(exit_status=status)) for status in (0, 3, None)]
    assert merged(parts).outcome.exit_status == 3
    assert merged([]) == Report()


def test_a_damaged_report_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match="is not a run folder"):
        files.read_report(tmp_path)
    files.write_report(tmp_path, Report(diagnoses=(diagnosis(),)))
    whole = (tmp_path / "report.json").read_bytes()
    assert files.read_report(tmp_path) == files.read_report(tmp_path / "report.json")
    for damaged in (b"", whole[:40], b"[]", b"\xff\xfe", whole.replace(b'"proven"', b'"certain"')):
        (tmp_path / "report.json").write_bytes(damaged)
        with pytest.raises(UnreadableRun) as caught:
            files.read_report(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_report_of_a_later_version_can_be_read(tmp_path: Path) -> None:
    files.write_report(tmp_path, Report(diagnoses=(diagnosis(),)))
    later = json.loads((tmp_path / "report.json").read_text())
    later["added"] = later["diagnoses"][0]["added"] = 1
    (tmp_path / "report.json").write_text(json.dumps(later))
    assert files.read_report(tmp_path).diagnoses == (diagnosis(),)


def test_events_of_which_some_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(
        b'{"kind": "start", "pid": 7}\n{"kind": "new"}\nhalf a li\n'
        b'{"kind": "exception", "symptom": "cuda-error"}\n'
        b'{"kind": "fault", "fault": {"where": "w", "error": "e"}}\n{"kind": "fault"}\n'
    )
    assert events.read_symptom(tmp_path) == "cuda-error"
    assert [fault.where for fault in events.read_faults(tmp_path)] == ["w"]
    assert events.read_symptom(tmp_path / "nothing") is None


def test_the_folder_of_a_process(tmp_path: Path) -> None:
    first, second = layout.claim_process_folder(tmp_path, 0), layout.claim_process_folder(tmp_path, 0)
    (second / "events.jsonl").write_bytes(b'{"kind": "start", "pid": 7}\n')
    assert (first.name, second.name) == ("rank0", f"rank0.{os.getpid()}")
    assert events.folder_of(tmp_path, 7) == second
    assert events.folder_of(tmp_path, 8) is None
    assert [layout.rank_of(folder) for folder in layout.process_folders(tmp_path)] == [0, 0]
