"""Every format holds the diagnosis, and no text of the run can end a record or become a command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchmedic.cli import main
from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment
from torchmedic.records.plain_text import visible
from torchmedic.report import formats, github, prompt, sarif, terminal
from torchmedic.report.console import recording_console
from torchmedic.report.frames import hunks
from torchmedic.runfolder import files

PATCH = "--- model.py\n+++ model.py\n@@ -2 +2 @@\n-    return s / d\n+    return s / (d + 1e-6)\n@@ -3,0 +4 @@\n+x()\n"
NASTY = "a%b\r\nc::d,e:f\u202e\x1b[31m </script> `x` [l](javascript:0) <b>"


def example(**changed: object) -> Diagnosis:
    fields: dict[str, object] = {
        "code": "TM201",
        "name": "division-by-zero",
        "grade": "proven",
        "message": "division by zero made the loss NaN",
        "cause": "1 of 32 divisors is 0",
        "step": 7,
        "locations": (
            Location(role="origin", file="data.py", line=3, column=1, end_column=5, code="load()", label="from here"),
            Location(role="cause", file="model.py", line=2, column=12, end_column=17, code="return s / d", indent=4),
        ),
        "evidence": ("the divisor is `d`",),
        "treatments": (Treatment(title="add a constant", proven=True, result="loss 2.3", patch=PATCH),),
    }
    return Diagnosis(**{**fields, **changed})  # type: ignore[arg-type]


def nasty() -> Diagnosis:
    place = Location(role="cause", file=NASTY, line=2, column=1, end_column=4, code=NASTY, label=NASTY)
    cure = Treatment(title=NASTY, proven=True, result=NASTY, patch=f"--- a\n+++ a\n@@ -1 +1 @@\n-{NASTY}\n+{NASTY}\n")
    return example(
        code=NASTY, name=NASTY, message=NASTY, cause=NASTY, locations=(place,), evidence=(NASTY,), treatments=(cure,)
    )


def test_hidden_characters_become_visible() -> None:
    assert visible("a\u202eb\x1b[0m\x00\ud800\tc\n") == "a\\u202eb\\x1b[0m\\x00\\ud800\tc\n"


def test_a_patch_is_read_by_the_counts_of_its_hunks() -> None:
    first, second = hunks(PATCH)
    assert (first.file, first.start, [change.text for change in first.removed]) == ("model.py", 2, ["    return s / d"])
    assert (second.start, second.removed, second.added[0].number) == (3, (), 4)
    # A line that begins with two minus signs is a line, not the head of a file.
    (odd,) = hunks("--- a.py\n+++ a.py\n@@ -1 +1 @@\n--- x\n+++ y\n")
    assert (odd.removed[0].text, odd.added[0].text) == ("-- x", "++ y")


def test_a_concise_line_suits_problem_matchers() -> None:
    matcher = r"^(.+?):(\d+):(\d+): (error|warning|note)\[(TM\d+)\] (.+)$"
    found = re.fullmatch(matcher, terminal.concise(example()))
    assert found is not None
    assert found.groups()[:5] == ("model.py", "2", "12", "error", "TM201")
    assert "\n" not in terminal.concise(nasty())
    assert "\x1b" not in terminal.concise(nasty())


def test_an_annotation_names_file_line_and_columns() -> None:
    line = github.annotation(example())
    assert line.startswith("::error title=TM201 division-by-zero,file=model.py,line=2,col=12,endColumn=16::")
    assert "%0Ahelp: add a constant [proven on your step: loss 2.3]" in line


def test_an_annotation_escapes_what_workflow_commands_give_a_meaning_to() -> None:
    line = github.annotation(nasty())
    assert "\n" not in line
    assert "\r" not in line
    properties, _, data = line.removeprefix("::error ").partition("::")
    given = dict(each.split("=", 1) for each in properties.split(","))
    assert given["file"].startswith("a%25b c%3A%3Ad%2Ce%3Af")
    assert set(given) == {"file", "line", "col", "endColumn", "title"}
    assert data.startswith("a%25b")
    # A property would end at a colon or a comma; the text after `::` may hold both.
    assert not set(given["title"]) & {":", ","}


def test_the_summary_of_a_job_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    report = Report(diagnoses=(example(),))
    assert formats.document(report, "github", None) == ""
    text = summary.read_text()
    assert text.startswith("before\n# torchmedic")
    assert "## error TM201: division by zero made the loss NaN" in text


def test_markdown_shows_text_of_the_run_as_text() -> None:
    text = github.markdown(Report(diagnoses=(nasty(),)), [nasty()])
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"`[^`\n]+`", "", outside)
    assert not re.search(r"(?<!\\)[<\[]", outside)
    assert "\u202e" not in text
    tricky = github.markdown(Report(), [example(treatments=(Treatment(title="x", patch="```\n# not a title"),))])
    assert "````diff\n```\n# not a title\n````" in tricky


def test_jsonl_has_one_record_per_line() -> None:
    report = Report(outcome=Outcome(exit_status=1, steps=7), diagnoses=(nasty(),))
    text = f"{formats.line(nasty(), 'jsonl')}\n{formats.document(report, 'jsonl', None)}"
    records = [json.loads(line) for line in text.split("\n") if line]
    assert [each["kind"] for each in records] == ["diagnosis", "outcome"]
    assert records[0]["message"] == NASTY
    assert records[1]["steps"] == 7


def test_a_prompt_holds_everything_and_keeps_its_bound() -> None:
    report = Report(outcome=Outcome(exit_status=1, steps=7), diagnoses=(example(),))
    text = prompt.document(report, report.diagnoses, None)
    for part in ("TM201", "proven", "model.py:2:12", "the divisor is `d`", "+    return s / (d + 1e-6)", "loss 2.3"):
        assert part in text
    long = example(evidence=tuple(f"fact {number} " + "x" * 300 for number in range(100)))
    for tokens in (100, 400, 1500):
        text = prompt.document(report, [long, long], None, tokens)
        assert len(text) <= 4 * tokens
        assert "TM201" in text
        assert "[cut: see report.json]" in text


def test_sarif_has_what_the_standard_requires() -> None:
    report = Report(outcome=Outcome(exit_status=1), diagnoses=(example(), nasty()))
    log = json.loads(sarif.document(report, report.diagnoses))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["invocations"] == [{"executionSuccessful": False, "exitCode": 1}]
    first, second = run["results"]
    assert rules[first["ruleIndex"]]["id"] == first["ruleId"] == "TM201"
    assert rules[second["ruleIndex"]]["id"] == second["ruleId"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "model.py", "uriBaseId": "SRCROOT"}
    assert place["region"] == {
        "startLine": 2,
        "startColumn": 12,
        "endColumn": 17,
        "snippet": {"text": "return s / d"},
    }
    assert first["relatedLocations"][0]["message"]["text"] == "from here"
    for result in run["results"]:
        assert result["level"] in ("none", "note", "warning", "error")
        for found in result["locations"]:
            # A URI holds no character that it would have to escape.
            assert re.fullmatch(r"[A-Za-z0-9%._~/:-]+", found["physicalLocation"]["artifactLocation"]["uri"])


def test_a_fix_of_sarif_makes_the_same_change_as_the_patch() -> None:
    log = json.loads(sarif.document(Report(), [example()]))
    source = ["def f(s, d):\n", "    return s / d\n", "\n", "end\n"]
    (change,) = log["runs"][0]["results"][0]["fixes"][0]["artifactChanges"]
    for each in reversed(change["replacements"]):
        region = each["deletedRegion"]
        assert (region["startColumn"], region["endColumn"]) == (1, 1)
        new = each["insertedContent"]["text"].splitlines(keepends=True)
        source[region["startLine"] - 1 : region["endLine"] - 1] = new
    assert source == ["def f(s, d):\n", "    return s / (d + 1e-6)\n", "\n", "x()\n", "end\n"]


def test_report_shows_and_writes_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = example(severity="note", code="TM999")
    files.write_report(tmp_path, Report(diagnoses=(example(), note)))
    for chosen in ("full", "concise", "jsonl", "github", "sarif", "markdown", "prompt"):
        assert main(["report", "--format", chosen, str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "TM201" in shown
        assert "TM999" not in shown
    output = tmp_path / "out.sarif"
    assert main(["report", "--notes", "--format", "sarif", "-o", str(output), str(tmp_path)]) == 0
    assert len(json.loads(output.read_text())["runs"][0]["results"]) == 2
    assert main(["report", "-o", str(output), str(tmp_path)]) == 2
    assert "--output needs --html" in capsys.readouterr().err


def test_a_patch_of_another_file_names_it_and_labels_stand_below_their_mark() -> None:
    code = "loss = compute(model, inputs, targets) + penalty(model) * weight"
    place = Location(role="cause", file="train.py", line=4, column=42, end_column=56, code=code, label="l" * 23)
    cure = Treatment(
        title="t", patch="--- train.py\n+++ train.py\n@@ -4 +4 @@\n-a\n+b\n--- m.py\n+++ m.py\n@@ -1 +1 @@\n-c\n+d\n"
    )
    console = recording_console(80)
    terminal.print_all(console, [example(locations=(place,), treatments=(cure,))], "full", None)
    shown = console.export_text().splitlines()
    mark = next(number for number, line in enumerate(shown) if "^^" in line)
    assert shown[mark].index("^") == shown[mark + 1].index("l")
    assert shown[shown.index(" 4 + b") + 1 :][:2] == ["  ::: m.py", " 1 - c"]
    assert "  ::: train.py" not in shown
