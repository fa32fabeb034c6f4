"""Custom autograd Functions: which class a failure is about, and what its backward returned from which line."""

from __future__ import annotations

import ast
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.lookup.layer_construction import class_nodes
from torchmedic.source.objects.graph import walk
from torchmedic.source.returns import with_return_line
from torchmedic.source.syntax import has_line, own_nodes
from torchmedic.source.user_code import is_user_file


class Returned(NamedTuple):
    """One call of a custom backward."""

    kind: type
    line: int  # of the `return`, or of the last statement
    value: Any
    needs: tuple[bool, ...]  # which inputs of the forward need a gradient


def functions_behind(failure: BackwardFailure) -> list[type]:
    """The user's own Functions in the graph of the loss."""
    found: dict[type, None] = {}
    for node in walk(root.grad_fn for root in failure.roots):
        kind = getattr(node, "_forward_cls", None)
        if isinstance(kind, type) and _code(kind) is not None:
            found[kind] = None
    return list(found)


def function_named(failure: BackwardFailure, name: str) -> type | None:
    """The Function whose node torch names, `ScaleBackward` for `Scale`."""
    wanted = name.removesuffix("Backward")
    return next((kind for kind in functions_behind(failure) if kind.__name__ == wanted), None)


def _code(kind: type, *names: str) -> CodeType | None:
    """The user's code of a backward, past decorators such as `once_differentiable`."""
    for name in names or ("backward", "vjp"):
        function = inspect.unwrap(getattr(kind, name, None) or len)
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and is_user_file(code.co_filename):
            return code
    return None


def method_node(kind: type, *names: str) -> tuple[str, ast.FunctionDef] | None:
    """The syntax of a method of a Function, the first of these names that it or a base of it defines."""
    for file, body in class_nodes(kind):
        for name in names:
            for node in body.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return file, node
    return None


def arguments_of(kind: type) -> list[str]:
    """The names of what `apply` takes, without `ctx`."""
    found = method_node(kind, "forward")
    if found is None:
        return []
    names = [argument.arg for argument in found[1].args.args]
    with_context = method_node(kind, "setup_context") is not None
    return names if with_context else names[1:]


def return_node(kind: type, line: int | None) -> tuple[str, ast.Return | ast.FunctionDef] | None:
    """The `return` of a backward at a line, or its only one; the function itself where it has none."""
    found = method_node(kind, "backward", "vjp")
    if found is None:
        return None
    file, function = found
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    if not returns:
        return file, function
    at = [node for node in returns if line is not None and has_line(node, line)]
    if at:
        return file, at[0]
    return (file, returns[0]) if len(returns) == 1 else None


def head_location(role: Role, file: str, node: ast.FunctionDef | ast.ClassDef, label: str) -> Location:
    """The line of a `def` or `class` alone."""
    word = "class" if isinstance(node, ast.ClassDef) else "def"
    end = node.col_offset + len(f"{word} {node.name}".encode())
    return place(role, file, node.lineno, label, node.col_offset, end, node.lineno)


def returned_location(found: tuple[str, ast.Return | ast.FunctionDef], label: str) -> Location:
    """Where a backward returns; its head if it has no `return`."""
    file, node = found
    if isinstance(node, ast.FunctionDef):
        return head_location("cause", file, node, label)
    return node_location("cause", file, node, label)


@contextlib.contextmanager
def watch_returns(kinds: list[type], seen: list[Returned]) -> Iterator[None]:
    """Note what the backward of each of these Functions returns, and from which line."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            for name in ("backward", "vjp"):
                if _code(kind, name) is not None:
                    stack.enter_context(_watched(kind, name, seen))
        yield


@contextlib.contextmanager
def _watched(kind: type, name: str, seen: list[Returned]) -> Iterator[None]:
    before = vars(kind).get(name)
    original: Callable[..., Any] = getattr(kind, name)
    code = _code(kind, name)
    lock = threading.Lock()  # a device has a thread of its own for backward

    def watched(ctx: Any, *args: Any) -> Any:
        value, line = with_return_line(code, original, ctx, *args)
        with lock:
            seen.append(Returned(kind, line, value, tuple(ctx.needs_input_grad)))
        return value

    setattr(kind, name, staticmethod(watched))
    try:
        yield
    finally:
        if before is None:
            delattr(kind, name)  # it is that of a base
        else:
            setattr(kind, name, before)


def returns_in_replay(failure: BackwardFailure, kinds: list[type]) -> list[Returned]:
    """What the backward of some Functions returned in a replay, in order; the last one is what torch refused."""
    seen: list[Returned] = []
    step = failure.replay()
    if step is not None:
        step.runner.play(watch_returns(kinds, seen))
    return seen


def gradients(value: Any) -> tuple[Any, ...]:
    """The gradients that a backward returned, as torch counts them."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)
