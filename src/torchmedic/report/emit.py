"""Prints diagnoses to stderr during the run, in the chosen format."""

from __future__ import annotations

import sys
from pathlib import Path

from torchmedic.records import Diagnosis, Report, encode
from torchmedic.settings import Settings
from torchmedic.source.text import relative


class Emitter:
    """Prints each diagnosis once. The run folder is shown relative to the working directory if it is below it."""

    def __init__(self, run: Path, settings: Settings) -> None:
        self._settings = settings
        self._run = Path(relative(str(run)))

    def say(self, diagnosis: Diagnosis) -> None:
        if self._settings.format == "json" or diagnosis.severity == "note" or diagnosis.in_traceback:
            return  # JSON is one report at the end; `torchmedic report` shows the rest
        from torchmedic.report import terminal
        from torchmedic.report.console import stderr_console

        console = stderr_console()
        if self._settings.format == "full":
            console.print()
        terminal.print_all(console, [diagnosis], self._settings.format, self._run)

    def finish(self, report: Report) -> None:
        if self._settings.format == "json":
            sys.stderr.write(encode(report).decode())
            sys.stderr.flush()
