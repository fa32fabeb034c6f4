"""What a user is not told: notes, unless they are asked for, and what a comment at the line says is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.cli import main
from torchmedic.examine.publication import is_suppressed
from torchmedic.records import Diagnosis, Location, Report
from torchmedic.report.formats import Emitter
from torchmedic.runfolder.files import write_report
from torchmedic.settings import Settings


def diagnosis(severity: str = "note", file: str = "train.py", line: int = 1) -> Diagnosis:
    place = Location(role="cause", file=file, line=line)
    return Diagnosis(
        code="TM601",
        name="a-name",
        severity=severity,
        grade="proven",
        message="a message",
        cause="",
        locations=(place,),
    )


@pytest.mark.parametrize(("severity", "is_said"), [("note", False), ("warning", True)])
def test_notes_are_not_said(capsys: pytest.CaptureFixture[str], severity: str, is_said: bool) -> None:
    Emitter(Path("run"), Settings()).say(diagnosis(severity))
    assert ("a message" in capsys.readouterr().err) is is_said


@pytest.mark.parametrize(("flags", "is_shown"), [([], False), (["--notes"], True)])
def test_notes_are_shown_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], is_shown: bool
) -> None:
    write_report(tmp_path, Report(diagnoses=(diagnosis(),)))
    assert main(["report", *flags, str(tmp_path)]) == 0
    assert ("a message" in capsys.readouterr().out) is is_shown


@pytest.mark.parametrize(
    ("line", "suppressed"),
    [
        ("step()", False),
        ("step()  # torchmedic: ignore", True),
        ("step()  #torchmedic:ignore[TM602, TM601]", True),
        ("step()  # torchmedic: ignore[TM602]", False),
        ("step()  # ignore", False),
    ],
)
def test_a_comment_at_the_line(tmp_path: Path, line: str, suppressed: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n")
    assert is_suppressed(diagnosis(file=str(script))) is suppressed
