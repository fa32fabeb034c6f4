"""The Python locks that threads of another process wait for and hold, from their lines and the source.

From outside, a lock has no name and no owner. But a thread that sleeps in a futex without a time limit at a line
`with b:` or `b.acquire()` waits for `b`, and a thread inside `with b:` holds `b`. Two such expressions are the same
lock if they begin at the same global variable of a file, at the same object (py-spy shows the address of a local
variable's object), or at the same variable of one enclosing function.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

import msgspec

from torchmedic.records.inside import InsideView, LockView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.source.syntax import FUNCTIONS, has_line, own_nodes, syntax_tree, taken_at
from torchmedic.supervise.proc import pyspy

_PRIVATE = 0x80


class _Scope(NamedTuple):
    """A frame, the functions around its line, innermost first, and the addresses of its variables' objects."""

    frame: PyFrame
    tree: ast.Module
    functions: list[FUNCTIONS]
    addresses: dict[str, int]

    @property
    def function(self) -> ast.AST:
        """The function that the frame executes, or the module."""
        return self.functions[0] if self.functions else self.tree


def with_locks(inside: dict[int, InsideView], views: dict[int, ProcessView]) -> dict[int, InsideView]:
    """Add the locks of all threads in all processes, if any thread waits for a lock.

    A fork keeps the addresses of objects, so a lock of a child is recognised in its parent.
    """
    waiting = {pid: _waiting(inner, views[pid]) for pid, inner in inside.items()}
    if not any(waiting.values()):
        return inside
    identities: dict[object, int] = {}
    return {pid: _with_locks(inner, waiting[pid], identities) for pid, inner in inside.items()}


def _waiting(inner: InsideView, view: ProcessView) -> set[int]:
    """The threads that wait in a futex without a time limit, at a line of the user's."""
    stuck = {wait.tid for wait in view.futexes if not wait.timed and wait.joins is None and _is_private(view, wait.tid)}
    return {thread.ident for thread in inner.threads if thread.tid in stuck and _may_wait(thread)}


def _with_locks(inner: InsideView, waiting: set[int], identities: dict[object, int]) -> InsideView:
    dump = pyspy.dump(inner.pid, values=True)
    if dump is None or not dump.threads:
        return inner
    once = _functions_alive(inner)
    threads = []
    for thread in inner.threads:
        scopes = _scopes(thread, dump.addresses.get(thread.tid, ()))
        wanted = _awaited(scopes[0], identities, once) if thread.ident in waiting and scopes else None
        held = [lock for scope in scopes for lock in _held(scope, identities, once)]
        threads.append(msgspec.structs.replace(thread, waits_for=thread.waits_for or wanted, holds=tuple(held)))
    return msgspec.structs.replace(inner, threads=tuple(threads))


def _is_private(view: ProcessView, tid: int) -> bool:
    """Whether the futex belongs to this process alone, unlike a lock of `multiprocessing`."""
    thread = view.thread(tid)
    return thread is not None and len(thread.arguments) > 1 and bool(thread.arguments[1] & _PRIVATE)


def _may_wait(thread: PyThread) -> bool:
    """Whether a thread stood at a line of the user's in all looks. A lock waits in C, so there is no deeper frame."""
    return len(thread.samples) > 1 and not thread.moved and bool(thread.frames) and thread.frames[0].user


def _functions_alive(inner: InsideView) -> dict[tuple[str, str], int]:
    """How many times each function is being executed, in all threads."""
    found: dict[tuple[str, str], int] = {}
    for thread in inner.threads:
        for frame in thread.frames:
            found[frame.file, frame.function] = found.get((frame.file, frame.function), 0) + 1
    return found


def _scopes(thread: PyThread, addresses: tuple[dict[str, int], ...]) -> list[_Scope]:
    found = []
    for number, frame in enumerate(thread.frames):
        tree = syntax_tree(frame.file) if frame.user else None
        if tree is not None:
            known = addresses[number] if len(addresses) == len(thread.frames) else {}
            found.append(_Scope(frame, tree, _functions(tree, frame), known))
    return found


def _functions(tree: ast.Module, frame: PyFrame) -> list[FUNCTIONS]:
    around = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and has_line(node, frame.line)]
    around.sort(key=lambda node: -node.lineno)
    # A decorator or a default runs outside the function that contains its line.
    while around and around[0].name != frame.function:
        del around[0]
    return around


def _awaited(scope: _Scope, identities: dict[object, int], once: dict[tuple[str, str], int]) -> LockView | None:
    """The lock that the line of the innermost frame waits for, if there is only one."""
    line = scope.frame.line
    found: list[ast.expr] = []
    for node in own_nodes(scope.function):
        if isinstance(node, ast.With | ast.AsyncWith):
            found += [item.context_expr for item in node.items if item.context_expr.lineno == line]
        elif (call := _call(node)) is not None and call[1:] == ("acquire", line):
            found.append(call[0])
    return _view(found[0], scope, line, identities, once) if len(found) == 1 else None


def _held(scope: _Scope, identities: dict[object, int], once: dict[tuple[str, str], int]) -> list[LockView]:
    views = (_view(node, scope, at, identities, once) for node, at in taken_at(scope.function, scope.frame.line))
    return [view for view in views if view is not None]


def _call(node: ast.AST) -> tuple[ast.expr, str, int] | None:
    """The parts of a call without arguments such as `x.acquire()`: `x`, the method and the line."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=[], keywords=[]):
            return value, method, node.lineno
    return None


def _view(
    node: ast.expr, scope: _Scope, line: int, identities: dict[object, int], once: dict[tuple[str, str], int]
) -> LockView | None:
    path: list[str] = []
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        path.append(root.attr)
        root = root.value
    start = _root(root.id, scope, once) if isinstance(root, ast.Name) else None
    if start is None:
        return None
    identity = identities.setdefault((start, *path), len(identities) + 1)
    return LockView(identity=identity, kind="lock", name=ast.unparse(node), file=scope.frame.file, line=line)


def _root(name: str, scope: _Scope, once: dict[tuple[str, str], int]) -> object | None:
    """A key for a variable: its object's address, a variable of an enclosing function, or a global variable."""
    if scope.addresses.get(name) and scope.functions:
        return scope.addresses[name]
    for function in scope.functions:
        if name in _bound(function):
            alone = once.get((scope.frame.file, function.name), 0) <= 1
            return (scope.frame.file, function.lineno, name) if alone else None
    return (scope.frame.file, name)


def _bound(function: FUNCTIONS) -> set[str]:
    arguments = function.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            names -= set(node.names)
    return names
