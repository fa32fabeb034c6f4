"""Diagnoses on their way to the user: on stderr, in the chosen format, while the run goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchmedic.records import Diagnosis, Report, encode
from torchmedic.settings import Settings


class Emitter:
    """Says each diagnosis once. The run folder is named relative to the working directory where possible."""

    def __init__(self, run: Path, settings: Settings) -> None:
        self._settings = settings
        shown = os.path.relpath(run)
        self._run = run if shown.startswith("..") else Path(shown)

    def say(self, diagnosis: Diagnosis) -> None:
        if self._settings.format == "json" or diagnosis.severity == "note":
            return  # one whole report at the end; notes are for those who ask (`torchmedic report --notes`)
        from torchmedic.report import terminal
        from torchmedic.report.console import stderr_console

        console = stderr_console()
        if self._settings.format == "concise":
            terminal.print_concise(console, diagnosis)
        else:
            console.print()
            terminal.print_full(console, diagnosis, self._run)

    def finish(self, report: Report) -> None:
        if self._settings.format == "json":
            sys.stderr.write(encode(report).decode())
            sys.stderr.flush()
