"""Consoles for stdout and stderr: colour only on a terminal, NO_COLOR and COLUMNS respected, 80 columns otherwise."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from rich.console import Console


def stderr_console() -> Console:
    return _console(sys.stderr)


def stdout_console() -> Console:
    return _console(sys.stdout)


def _console(stream: TextIO) -> Console:
    width = 80
    if stream.isatty() or "COLUMNS" in os.environ:
        width = shutil.get_terminal_size((80, 24)).columns
    return Console(file=stream, highlight=False, width=max(width, 40), markup=False, emoji=False)
