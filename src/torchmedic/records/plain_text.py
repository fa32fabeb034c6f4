"""Text that comes from elsewhere, made safe: exception texts, file names and fields of a report that was mailed.

Control characters of a terminal can hide text, move the cursor or change the title of the window. So they are shown,
not sent. In a report, the colours of a message are left out, because they say nothing.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

MAX_CHARACTERS = 20_000  # characters of one text in a report

# Control characters except newline and tab, controls of text direction, line separators, invisible characters, and
# halves of surrogate pairs.
_RANGES = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f"
    "\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff"
)
_HIDDEN = re.compile(f"[{_RANGES}]")
_HIDDEN_IN_HTML = re.compile(f"[<>&{_RANGES}]")
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")

_Value = TypeVar("_Value")


def visible(text: str) -> str:
    """The text with every control character, direction mark and lone surrogate written as an escape."""
    return _HIDDEN.sub(lambda found: _escape(ord(found[0])), text.replace("\r\n", "\n"))


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def cleaned(value: _Value) -> _Value:
    """A record with all its texts visible and without colours, and none of them longer than `MAX_CHARACTERS`."""
    changed: Any = value
    if isinstance(value, str):
        changed = visible(_COLOUR.sub("", value[: 2 * MAX_CHARACTERS]))
        if len(changed) > MAX_CHARACTERS:
            changed = changed[: MAX_CHARACTERS - 3] + "..."
    elif isinstance(value, msgspec.Struct):
        changed = msgspec.structs.replace(
            value, **{name: cleaned(getattr(value, name)) for name in value.__struct_fields__}
        )
    elif isinstance(value, dict):
        changed = {cleaned(key): cleaned(item) for key, item in value.items()}
    elif isinstance(value, tuple):
        changed = tuple(cleaned(item) for item in value)
    elif isinstance(value, list):
        changed = [cleaned(item) for item in value]
    return changed  # type: ignore[no-any-return]


def visible_json(text: str, *, in_html: bool = False) -> str:
    """JSON with the same characters as escapes of JSON; with `in_html`, also those that could end an HTML element."""
    hidden = _HIDDEN_IN_HTML if in_html else _HIDDEN
    return hidden.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The visible text on one line, for formats in which a line is a record."""
    return " ".join(visible(text).split())


def clipped(text: str, length: int) -> str:
    """At most `length` characters, with a mark where text was cut off."""
    return text if len(text) <= length else text[: max(0, length - 4)] + " ..."
