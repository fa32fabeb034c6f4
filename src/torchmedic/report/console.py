"""Consoles for stdout and stderr: colour only on a terminal, NO_COLOR and COLUMNS respected, 80 columns otherwise.

Whatever is printed through them is visible text: a control character in a file name, in the text of an exception or in
a report never reaches the terminal.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchmedic.records.plain_text import visible


class _SafeConsole(Console):
    """A console that sends no control character except those that rich itself makes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def stderr_console() -> Console:
    return _console(sys.stderr)


def stdout_console() -> Console:
    return _console(sys.stdout)


def recording_console(width: int) -> Console:
    """A console that prints nothing and keeps everything, for `export_html` and `export_text`."""
    return _SafeConsole(
        file=io.StringIO(), record=True, width=width, highlight=False, markup=False, emoji=False, force_jupyter=False
    )


def _console(stream: TextIO) -> Console:
    width = 80
    if stream.isatty() or "COLUMNS" in os.environ:
        width = shutil.get_terminal_size((80, 24)).columns
    return _SafeConsole(
        file=stream, highlight=False, width=max(width, 40), markup=False, emoji=False, force_jupyter=False
    )
