"""Notebooks: `%load_ext torchmedic`, then `%%torchmedic` for one cell or `%torchmedic on` for all that follow.

A watched cell runs exactly as without torchmedic, and fails in the same way. The diagnosis is shown below it. The cells
have numbers in a notebook and files only in the kernel, so that a place is shown as `cell [3], line 2`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from torchmedic.errors import UsageError
from torchmedic.integrations.session import Session, session_of_tool
from torchmedic.records import Diagnosis
from torchmedic.source.user_code import relative

_MAGIC = re.compile(r"\s*%%torchmedic\b[^\n]*")
_PLACE = re.compile(r"(cell \[\d+\]):(\d+)(?::\d+)?")
_INPUT = r"<ipython-input-(?P<number>\d+)-\w+>"  # the name of a cell outside of a kernel
_HTML_WIDTH = 100
_HTML = (
    '<div style="border-left: 4px solid #d33; padding: 0 0 0 12px">'
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.4; margin: 0"><code>{code}</code></pre></div>'
)
# Background, text, and black, red, green, yellow, blue, magenta, cyan, white: readable on a light and a dark page.
_COLOURS = (
    (255, 255, 255),
    (128, 128, 128),
    [
        *((96, 96, 96), (209, 69, 59), (58, 150, 78), (176, 128, 0)),
        *((66, 126, 190), (160, 90, 170), (30, 140, 150), (144, 144, 144)),
    ],
)


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext torchmedic`."""
    unload_ipython_extension(shell)
    _Notebook(shell).register()


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext torchmedic`."""
    known = getattr(shell.find_line_magic("torchmedic"), "__self__", None)
    if isinstance(known, _Notebook):
        known.unregister()


class Shown:
    """A diagnosis as a notebook shows it."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def _repr_html_(self) -> str:
        from rich.terminal_theme import TerminalTheme

        page = self._printed().export_html(theme=TerminalTheme(*_COLOURS), inline_styles=True, code_format=_HTML)
        return _PLACE.sub(r"\1, line \2", page)

    def __repr__(self) -> str:
        return _PLACE.sub(r"\1, line \2", self._printed().export_text().rstrip("\n"))

    def _printed(self) -> Any:
        from torchmedic.report import terminal
        from torchmedic.report.console import recording_console

        console = recording_console(_HTML_WIDTH)
        terminal.print_all(console, [self.diagnosis], "full", None)
        return console


def with_cell_numbers(shell: Any, diagnosis: Diagnosis) -> Diagnosis:
    """A diagnosis in which the files of cells are replaced by the numbers of the cells."""
    names = {name: f"cell [{number}]" for file, number in _cells(shell).items() for name in (file, relative(file))}
    files = re.compile("|".join([*map(re.escape, sorted(names, key=len, reverse=True)), _INPUT]))
    return msgspec.convert(_renamed(msgspec.to_builtins(diagnosis), files, names), Diagnosis)


def _cells(shell: Any) -> dict[str, int]:
    """The numbers of the cells by their files. IPython 7 keeps only texts; the names of the files come from those."""
    known: dict[str, int] | None = getattr(shell.compile, "_filename_map", None)
    if known is not None:
        return known
    texts = {int(name[2:]): text for name, text in shell.user_ns.items() if re.fullmatch(r"_i\d+", name)}
    return {
        shell.compile.get_code_name(raw, raw, number): number
        for number, text in sorted(texts.items())
        for raw in (text, f"{text}\n")  # the kept text has no newline at its end
    }


def _renamed(value: Any, files: re.Pattern[str], names: dict[str, str]) -> Any:
    if isinstance(value, str):
        shown = files.sub(lambda found: names.get(found[0]) or f"cell [{found['number']}]", value)
        return _PLACE.sub(r"\1, line \2", shown)
    if isinstance(value, dict):
        return {key: _renamed(each, files, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, files, names) for each in value]
    return value


class _Notebook:
    """The watched cells of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._is_on = False
        self._begun: list[Session | None] = []  # one for each cell under way: a cell may run other cells

    def register(self) -> None:
        shell = self._shell
        shell.register_magic_function(self.torchmedic, magic_kind="line", magic_name="torchmedic")
        shell.input_transformers_cleanup.append(self._without_magic)
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)
        shell.display_formatter.formatters["text/html"].for_type(Diagnosis, lambda each: Shown(each)._repr_html_())
        shell.display_formatter.formatters["text/plain"].for_type(
            Diagnosis, lambda each, printer, _: printer.text(repr(Shown(each)))
        )

    def unregister(self) -> None:
        shell = self._shell
        del shell.magics_manager.magics["line"]["torchmedic"]
        shell.input_transformers_cleanup.remove(self._without_magic)
        shell.events.unregister("pre_run_cell", self._before)
        shell.events.unregister("post_run_cell", self._after)
        for name in ("text/html", "text/plain"):
            shell.display_formatter.formatters[name].pop(Diagnosis, None)

    def torchmedic(self, line: str) -> None:
        """`%torchmedic on` watches all cells that follow, `%torchmedic off` stops; `%%torchmedic` watches one cell."""
        wanted = line.strip()
        if wanted not in ("on", "off"):
            raise UsageError(
                "%torchmedic takes `on` or `off`; %%torchmedic on the first line of a cell watches the cell"
            )
        self._is_on = wanted == "on"

    def _without_magic(self, lines: list[str]) -> list[str]:
        """Turn the line `%%torchmedic` into a comment, so that the lines of the cell keep their numbers.

        Another magic of the cell, such as `%%time`, must come first: then the line is left out.
        """
        if not lines or not _MAGIC.match(lines[0]):
            return lines
        return lines[1:] if lines[1:] and lines[1].startswith("%%") else ["# " + lines[0].lstrip(), *lines[1:]]

    def _before(self, info: Any) -> None:
        is_wanted = self._is_on or _MAGIC.match(info.raw_cell or "")
        self._begun.append(self._session() if is_wanted else None)
        if (begun := self._begun[-1]) is not None:
            begun.begin()

    def _after(self, result: Any) -> None:
        begun = self._begun.pop() if self._begun else None
        if begun is not None:
            if result.error_in_exec is not None:
                begun.failed(result.error_in_exec)
            begun.end()

    def _session(self) -> Session | None:
        found = session_of_tool("notebook")
        if found is not None:
            found.say = self._say
            found.present = lambda diagnosis: with_cell_numbers(self._shell, diagnosis)
        return found

    def _say(self, diagnosis: Diagnosis) -> None:
        if diagnosis.severity != "note" and not diagnosis.in_traceback:
            from IPython.display import display

            display(Shown(diagnosis))
