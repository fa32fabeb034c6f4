"""Makes text from the run safe to show: characters that hide or reorder text become visible escapes."""

from __future__ import annotations

import re

# Control characters except newline and tab, controls of text direction, line separators, halves of surrogate pairs.
_RANGES = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f"
    "\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff"
)
_HIDDEN = re.compile(f"[{_RANGES}]")
_HIDDEN_IN_JSON = re.compile(f"[<>&{_RANGES}]")


def visible(text: str) -> str:
    """The text with every control character, direction mark and lone surrogate written as an escape."""
    return _HIDDEN.sub(lambda match: _escape(ord(match[0])), text.replace("\r\n", "\n"))


def visible_json(text: str) -> str:
    """JSON with the same characters written as escapes of JSON, and with none that could end an element of HTML."""
    return _HIDDEN_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """The visible text on one line, for formats in which a line is a record."""
    return " ".join(visible(text).split())


def clipped(text: str, length: int) -> str:
    """At most `length` characters, with a mark where text was cut off."""
    return text if len(text) <= length else text[: max(0, length - 4)] + " ..."


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
