"""Lines to add to a loop, as patches."""

from __future__ import annotations

from torchmedic.source.spots import Place
from torchmedic.source.text import relative, source_line


def line_added_after(where: Place, line: str) -> str:
    """A patch that puts a line behind another one, indented like it. Empty where that is no whole statement."""
    text = source_line(where.file, where.line)
    if not _is_whole(text):
        return ""
    return _patch(where.file, where.line, where.line + 1, _indented(text, line))


def line_added_before(where: Place, line: str) -> str:
    """A patch that puts a line before another one, indented like it."""
    text = source_line(where.file, where.line)
    if not _is_whole(text):
        return ""
    return _patch(where.file, where.line - 1, where.line, _indented(text, line))


def _is_whole(text: str) -> bool:
    """Whether a statement begins and ends on this line, as far as its brackets tell."""
    code = text.split("#", maxsplit=1)[0].strip()
    return bool(code) and not code.endswith((":", ",", "\\", "(")) and code.count("(") == code.count(")")


def _indented(like: str, line: str) -> str:
    return like[: len(like) - len(like.lstrip())] + line


def _patch(file: str, old: int, new: int, line: str) -> str:
    name = relative(file)
    return f"--- {name}\n+++ {name}\n@@ -{old},0 +{new} @@\n+{line}\n"
