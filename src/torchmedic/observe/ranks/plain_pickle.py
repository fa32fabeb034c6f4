"""Read the bytes of torch's Flight Recorder, which come as a pickle, without unpickling them.

Only plain data is understood: numbers, texts, lists, tuples, dictionaries. Any other opcode is refused, so that no
code can be called by what is read.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "SHORT_BINSTRING", "BINSTRING",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FRESH: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def loads(data: bytes) -> Any:
    """Return the plain data of a pickle.

    Raises:
        ValueError: It holds something other than plain data, or is damaged.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _FRESH:
                stack.append(_FRESH[name]())
            elif name == "MARK":
                stack.append(_MARK)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
                _fill(stack, name)
            elif name in _SHORT_TUPLES:
                size = _SHORT_TUPLES[name]
                stack[-size:] = [tuple(stack[-size:])]
            elif name == "TUPLE":
                stack.append(tuple(_since_mark(stack)))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"opcode {name} is not plain data")
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged: {error}") from None
    raise ValueError("damaged: it has no end")


def _fill(stack: list[Any], name: str) -> None:
    if name == "APPEND":
        items = [stack.pop()]
    elif name == "SETITEM":
        items = [stack.pop(-2), stack.pop()]
    else:
        items = _since_mark(stack)
    if name.startswith("APPEND"):
        stack[-1].extend(items)
    else:
        stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    items.reverse()
    return items
