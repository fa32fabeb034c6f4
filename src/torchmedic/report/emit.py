"""Prints diagnoses to stderr during the run, in the chosen format."""

from __future__ import annotations

import sys
from pathlib import Path

from torchmedic.records import Diagnosis, Report
from torchmedic.records.plain_text import visible
from torchmedic.settings import Settings
from torchmedic.source.user_code import relative


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
        from torchmedic.report import formats

        line = formats.line(diagnosis, self._format)
        if line is not None:
            _write(f"{line}\n")

    def finish(self, report: Report) -> None:
        """Write what the format adds at the end of the run: a document, a summary or nothing."""
        if self._format == "full":
            return
        from torchmedic.report import formats

        _write(formats.document(report, self._format, self._run))


def _write(text: str) -> None:
    sys.stderr.write(visible(text))
    sys.stderr.flush()
