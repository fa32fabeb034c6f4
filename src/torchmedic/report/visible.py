"""Visible text of the run that also fits a format: on one line, or of a limited length."""

from __future__ import annotations

from torchmedic.records.plain_text import visible


def one_line(text: str) -> str:
    """The visible text on one line, for formats in which a line is a record."""
    return " ".join(visible(text).split())


def clipped(text: str, length: int) -> str:
    """At most `length` characters, with a mark where text was cut off."""
    return text if len(text) <= length else text[: max(0, length - 4)] + " ..."
