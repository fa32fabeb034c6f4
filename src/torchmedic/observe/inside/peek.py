"""Look at what another thread is doing and holds, without running any code of the user's.

No `__getattr__`, no property, no `__len__` of a class of theirs: names are looked up in dicts, and only builtin types
are asked anything.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections import deque
from types import FrameType, ModuleType
from typing import Any, TypeGuard

from torchmedic.source.live_frames import Position, position_of
from torchmedic.source.syntax import nodes_in, syntax_tree

MISSING = object()

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, tuple, dict, set, frozenset, deque, bytearray)


def is_between_rounds(frame: FrameType) -> bool:
    """Whether a frame is at the end of a round of a loop, or at its own beginning: it runs, and waits for nothing."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else "RESUME"
    return "JUMP_BACKWARD" in name or name == "RESUME"


@functools.lru_cache(maxsize=64)
def _nodes(file: str) -> dict[Position, ast.AST]:
    """Every node of a file by its place; of those at the same place the innermost."""
    return {
        (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0): node
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.expr | ast.stmt)
    }


def under_way(frame: FrameType) -> ast.AST | None:
    """The expression or statement that a frame is executing."""
    return _nodes(frame.f_code.co_filename).get(position_of(frame.f_code, frame.f_lasti))


def expression(frame: FrameType) -> tuple[str, ast.expr | None]:
    """The text of what a frame is executing, and its tree if it is one expression."""
    node = under_way(frame)
    if isinstance(node, ast.With):
        # Up to Python 3.13 the whole statement is under way while one of its locks is waited for: the last, mostly.
        node = node.items[-1].context_expr
    if isinstance(node, ast.expr):
        return ast.unparse(node), node
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip(), None


def value_of(node: ast.expr | None, frame: FrameType, known: dict[str, Any]) -> Any:
    """What a name, an attribute or a constant item stands for; MISSING where finding out would run code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for names in (known, frame.f_globals):
            if node.id in names:
                return names[node.id]
        return MISSING
    if isinstance(node, ast.Attribute):
        return attribute(value_of(node.value, frame, known), node.attr)
    if is_length(node):
        return _length(value_of(node.args[0], frame, known))
    if isinstance(node, ast.Subscript):
        holder = value_of(node.value, frame, known)
        key = value_of(node.slice, frame, known)
        if type(holder) in (list, tuple, dict) and type(key) in (int, str):
            try:
                return holder[key]
            except (KeyError, IndexError, TypeError):
                return MISSING
    return MISSING


def is_length(node: ast.AST | None) -> TypeGuard[ast.Call]:
    """Whether this is `len(x)` of a name or an attribute."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name() | ast.Attribute()], keywords=[]):
            return True
    return False


def _length(holder: Any) -> Any:
    if type(holder) in (*_SIZED, str, bytes):
        return len(holder)
    size = getattr(holder, "shape", None) if type(holder).__module__.startswith("torch") else None
    return size[0] if size else MISSING


def attribute(holder: Any, name: str) -> Any:
    """An attribute that lies in a dict: of the object, of its module, or of its classes if it is no descriptor."""
    if holder is MISSING:
        return MISSING
    if isinstance(holder, ModuleType):
        return holder.__dict__.get(name, MISSING)
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        own = {}
    if isinstance(own, dict):
        if name in own:
            return own[name]
        for group in ("_modules", "_parameters", "_buffers"):
            inner = own.get(group)
            if isinstance(inner, dict) and name in inner:
                return inner[name]
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            return MISSING if hasattr(type(found), "__get__") else found
    return MISSING


def fingerprint(value: Any) -> str:
    """Short text that changes if the value does, as far as that can be seen without asking the user's own classes."""
    if type(value) in _PLAIN:
        return repr(value)[:80]
    if (kind := _sized(value)) is not None:
        return f"{type(value).__name__} of {kind.__len__(value)}"
    version = getattr(value, "_version", None) if type(value).__module__.startswith("torch") else None
    if isinstance(version, int):
        return f"{type(value).__name__} {id(value):x} version {version}"
    return f"{type(value).__name__} {id(value):x}"


def shown(value: Any) -> str:
    """A short text of a value for people."""
    is_plain = type(value) in _PLAIN or _sized(value) is not None
    return fingerprint(value) if is_plain else f"a {type(value).__name__}"


def is_opaque(value: Any) -> bool:
    """Whether code of a class decides if this counts as true: it may change while the object is the same."""
    if type(value) in _PLAIN or _sized(value) is not None or type(value).__module__.startswith("torch"):
        return False
    if any(kind.__name__ == "generic" and kind.__module__ == "numpy" for kind in type(value).__mro__):
        return False  # one number
    return any(name in kind.__dict__ for kind in type(value).__mro__ for name in ("__bool__", "__len__"))


def _sized(value: Any) -> Any:
    """The builtin container that a value is, or that its class adds to: a Counter, a defaultdict."""
    kind = next((each for each in type(value).__mro__ if each in _SIZED), None)
    own = type(value).__mro__[: type(value).__mro__.index(kind)] if kind is not None else ()
    return None if any("__len__" in each.__dict__ or "__bool__" in each.__dict__ for each in own) else kind
