"""Whether the result of a call is ever differentiated: the way of a value through the user's source.

Followed from the line that made it, through assignments, containers and attributes, out of the functions that return
it. Names are told apart by the assignment that is in force, so that the `loss` of a validation is not taken for that of
the training above it. Where it cannot be followed, it is taken to go backward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Literal

from torchmedic.evidence.memory.source.branches import not_taken
from torchmedic.source.bindings import binds, function_body, own_statements, reaching
from torchmedic.source.live_frames import Frame
from torchmedic.source.segment.cut import turn_around
from torchmedic.source.syntax import (
    ADDING_METHODS,
    BACKWARD_CALLS,
    FUNCTIONS,
    callee,
    calls_backward,
    cuts_graph,
    last_name,
    nodes_in,
    syntax_tree,
)
from torchmedic.source.user_variables import user_trees

Backward = Literal["every turn", "somewhere", "never"]

_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def is_differentiated(frames: Sequence[Frame]) -> bool:
    """Whether backward may go through what the innermost of these frames is computing.

    Args:
        frames: From the outermost one to the user's call of the model.
    """
    trainers = _trainers()
    for frame in reversed(frames):
        if not frame.is_user:
            return True  # a library was given it
        body = function_body(frame)
        way = _Way(body, trainers, (frame.statement, frame.node), passed=not_taken(frame, body))
        if way.goes_backward() or is_differentiated_later(way.stored()):
            return True
        if not way.is_returned():
            return False
    return False


def is_variable_differentiated(frames: Sequence[Frame], code: CodeType, name: str) -> bool:
    """Whether backward may go through the value of a variable, in its function or where the function returns it."""
    for position, frame in reversed(list(enumerate(frames))):
        if frame.live.f_code is code:
            body = function_body(frame)
            way = _Way(body, _trainers(), own=name, passed=not_taken(frame, body))
            return way.goes_backward() or (way.is_returned() and is_differentiated(frames[:position]))
    return False


def is_differentiated_later(names: frozenset[str]) -> bool:
    """Whether a function of the user's goes backward through something of one of these names."""
    if not names:
        return False
    return any(
        _Way(body, frozenset(), names=names).goes_backward() for body in _training(tree for _, tree in user_trees())
    )


def is_name_differentiated(name: str, files: Iterable[str]) -> bool:
    """Whether one function goes backward through what goes by a name: a variable of its own, or anything else."""
    bodies = _training(filter(None, map(syntax_tree, files)))
    return any(_Way(body, frozenset(), names=frozenset({name}), own=name).goes_backward() for body in bodies)


def _training(trees: Iterable[ast.Module]) -> Iterator[ast.AST]:
    """The functions and modules that go backward."""
    bodies = (node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS | ast.Module))
    return filter(calls_backward, bodies)


def backward_around(frame: FrameType, line: int) -> Backward:
    """Whether the innermost loop around a line goes backward itself, or at least its file somewhere."""
    if any(map(calls_backward, turn_around(frame, line))):
        return "every turn"
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    names = {node.attr for node in nodes_in(tree) if isinstance(node, ast.Attribute)}
    return "never" if names.isdisjoint(BACKWARD_CALLS) else "somewhere"


def source_goes_backward() -> bool:
    """Whether any module of the user calls backward."""
    return any(calls_backward(tree) for _, tree in user_trees())


class _Way:
    """The way of a value through one function, from a statement that makes it or from names that hold it."""

    def __init__(
        self,
        body: ast.AST | None,
        trainers: frozenset[str],
        start: tuple[ast.stmt | None, ast.expr | None] | None = None,
        names: frozenset[str] = frozenset(),
        own: str = "",
        passed: frozenset[int] = frozenset(),
    ) -> None:
        self._backward = BACKWARD_CALLS | trainers
        self._body = body
        statements = own_statements(body) if isinstance(body, FUNCTIONS | ast.Module) else ()
        self._statements = [each for each in statements if id(each) not in passed]
        self._start, self._node = start or (None, None)
        self._names = names
        self._own = own  # a variable of the function itself
        self._asked: set[tuple[int, str]] = set()

    def goes_backward(self) -> bool:
        for statement in self._statements:
            for call in _calls(statement):
                parts = [*call.args, *(each.value for each in call.keywords)]
                if isinstance(call.func, ast.Attribute):
                    parts.append(call.func.value)
                if callee(call) in self._backward and self._any(parts, statement):
                    return True
        return any(self._is_captured(name) for name in _captured(self._body))

    def _is_captured(self, name: str) -> bool:
        """Whether a variable that a function within this one reads may lead to the value."""
        return any(
            binds(statement, name) and self._any([value], statement)
            for statement in self._statements
            if isinstance(value := getattr(statement, "value", None), ast.expr)
        )

    def is_returned(self) -> bool:
        if not self._statements:
            return True  # a lambda or comprehension: all that it does is return
        for statement in self._statements:
            for node in [statement, *_expressions(statement)]:
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    self._asked.clear()
                    if self._carries(node.value, statement):
                        return True
        return False

    def _any(self, parts: list[ast.expr], statement: ast.stmt) -> bool:
        self._asked.clear()
        return any(self._carries(part, statement) for part in parts)

    def stored(self) -> frozenset[str]:
        """The names of attributes, and of containers of others, that the value is put into."""
        found = set()
        for statement in self._statements:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    holders: list[ast.expr] = [each for each in targets if isinstance(each, ast.Attribute)]
                    parts = [value]
                case ast.AugAssign(target=ast.Attribute() as target, value=value):
                    holders, parts = [target], [value]
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method), args=args)):
                    holders, parts = [owner] if method in ADDING_METHODS else [], args
                case _:
                    continue
            if holders and self._any(parts, statement):
                found |= {last for each in holders if (last := last_name(each)) and not self._makes(last)}
        return frozenset(found)

    def _makes(self, name: str) -> bool:
        """Whether a name is a variable of this function, not of its module."""
        return not isinstance(self._body, ast.Module) and any(binds(statement, name) for statement in self._statements)

    def _carries(self, expression: ast.AST, at: ast.stmt) -> bool:
        """Whether an expression leads to the value, in a graph."""
        if self._start is not None and (expression is self._node or (self._node is None and at is self._start)):
            return True
        match expression:
            case ast.Call() if cuts_graph(expression):
                return False
            case ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.Constant():
                return False
            case ast.Name(id=name):
                return self._name_carries(name, at)
            case ast.Attribute():
                text = ast.unparse(expression)
                kept = expression.attr in self._names or self._is_kept_as(text)
                return kept or self._carries(expression.value, at)
        return any(self._carries(child, at) for child in ast.iter_child_nodes(expression))

    def _name_carries(self, name: str, at: ast.stmt) -> bool:
        if (id(at), name) in self._asked:
            return False
        self._asked.add((id(at), name))
        if name == self._own or self._is_kept_as(name) or (name in self._names and not self._makes(name)):
            return True
        body = self._body
        assert isinstance(body, FUNCTIONS | ast.Module)
        for made in reaching(body.body, name, at):
            match made:
                case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                    parts: list[ast.AST] = [value]
                case ast.AugAssign(value=value, target=target):
                    parts = [value, ast.Name(id=getattr(target, "id", ""), ctx=ast.Load())]
                case ast.For(iter=over) | ast.AsyncFor(iter=over):
                    parts = [over]
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    parts = [item.context_expr for item in items]
                case _:
                    continue
            if any(self._carries(part, made) for part in parts):
                return True
        return False

    def _is_kept_as(self, text: str) -> bool:
        """Whether the value is put into something of this name: a container by a method, an attribute or an item."""
        key = (0, text)
        if key in self._asked:
            return False
        self._asked.add(key)
        for statement in self._statements:
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method), args=args)):
                    owners, parts = [owner] if method in ADDING_METHODS else [], args
                case ast.Assign(targets=targets, value=value):
                    items = [each.value for each in targets if isinstance(each, ast.Subscript)]
                    owners, parts = [*items, *(each for each in targets if isinstance(each, ast.Attribute))], [value]
                case _:
                    continue
            is_owner = any(ast.unparse(each) == text for each in owners)
            if is_owner and any(self._carries(part, statement) for part in parts):
                return True
        return False


def _captured(body: ast.AST | None) -> set[str]:
    """Variables that functions within a function read from around them, as far as they go backward."""
    found: set[str] = set()
    for inner in nodes_in(body):
        if isinstance(inner, FUNCTIONS) and inner is not body and calls_backward(inner):
            own = {each.arg for each in ast.walk(inner.args) if isinstance(each, ast.arg)}
            names = {each.id for each in ast.walk(inner) if isinstance(each, ast.Name)}
            found |= {
                name for name in names - own if not any(binds(statement, name) for statement in own_statements(inner))
            }
    return found


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    return (node for node in _expressions(statement) if isinstance(node, ast.Call))


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, not those of the statements inside it."""
    if not isinstance(statement, _COMPOUND):
        yield from ast.walk(statement)
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem):
            yield from ast.walk(child)


def _trainers() -> frozenset[str]:
    """The names of functions of the user's that go backward."""
    return frozenset(
        node.name
        for _, tree in user_trees()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and calls_backward(node)
    )
