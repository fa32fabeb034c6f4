"""The formats of a report: some are one line per diagnosis, others are one document. Also prints them during a run."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from torchmedic.records import Diagnosis, Report, encode, encode_line
from torchmedic.records.plain_text import visible, visible_json
from torchmedic.settings import Format, Settings
from torchmedic.source.user_code import relative


def line(diagnosis: Diagnosis, chosen: Format) -> str | None:
    """A diagnosis in a format of lines; None if the format is a document or is made for a terminal."""
    if chosen == "concise":
        from torchmedic.report import terminal

        return terminal.concise(diagnosis)
    if chosen == "github":
        from torchmedic.report import github

        return github.annotation(diagnosis)
    if chosen == "jsonl":
        return _json_line("diagnosis", diagnosis)
    return None


def document(report: Report, chosen: Format, run: Path | None, *, notes: bool = False, tokens: int = 0) -> str:
    """The text that a format adds at the end of a run; empty for formats that consist of lines only.

    Args:
        report: What was found.
        chosen: The format.
        run: The run folder, for data that `report.json` does not contain.
        notes: Whether to include diagnoses of severity `note`.
        tokens: The bound of `prompt`; 0 is its default.
    """
    shown = [diagnosis for diagnosis in report.diagnoses if notes or diagnosis.severity != "note"]
    if chosen == "json":
        return encode(report).decode()
    if chosen == "jsonl":
        return _json_line("outcome", report.outcome) + "\n"
    if chosen == "sarif":
        from torchmedic.report import sarif

        return sarif.document(report, shown)
    if chosen == "markdown":
        from torchmedic.report import github

        return github.markdown(report, shown)
    if chosen == "prompt":
        from torchmedic.report import prompt

        return prompt.document(report, shown, run, tokens or prompt.DEFAULT_TOKENS)
    if chosen == "github":
        from torchmedic.report import github

        github.write_summary(report, shown)
    return ""


def _json_line(kind: str, record: msgspec.Struct) -> str:
    return visible_json(encode_line({"kind": kind, **msgspec.to_builtins(record)}).decode())


class Emitter:
    """Prints each diagnosis once. The run folder is shown relative to the working directory if it is below it."""

    def __init__(self, run: Path, settings: Settings) -> None:
        self._format = settings.format
        self._run = Path(relative(str(run)))

    def say(self, diagnosis: Diagnosis) -> None:
        if diagnosis.severity == "note" or diagnosis.in_traceback:
            return  # `torchmedic report` shows them
        if self._format == "full":
            from torchmedic.report import terminal
            from torchmedic.report.console import stderr_console

            console = stderr_console()
            console.print()
            terminal.print_all(console, [diagnosis], "full", self._run)
            return
        text = line(diagnosis, self._format)
        if text is not None:
            _write(f"{text}\n")

    def finish(self, report: Report) -> None:
        """Write what the format adds at the end of the run: a document, a summary or nothing."""
        if self._format != "full":
            _write(document(report, self._format, self._run))


def _write(text: str) -> None:
    sys.stderr.write(visible(text))
    sys.stderr.flush()
