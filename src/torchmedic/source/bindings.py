"""Which assignment gave a name the value that it has at a line: reaching definitions, on the syntax of one function.

Where branches leave more than one possibility, all of them are returned: the caller must not pick one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Final

from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import FUNCTIONS, LOOPS, blocks, function_of

Binding = ast.AST
Bindings = frozenset[Binding]


class _Entry(ast.AST):
    """The value that a name had when the function began: a parameter, or nothing."""


ENTRY: Final = _Entry()


class _Reached(Exception):
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings


def reaching(body: list[ast.stmt], name: str, target: ast.stmt) -> Bindings:
    """The bindings of `name` that may be in force when `target`, a statement somewhere in `body`, begins.

    A `for` loop stands for the binding of its loop variable. ENTRY is among them if the name may be unbound so far.
    """
    try:
        _Flow(name, target).block(body, frozenset({ENTRY}))
    except _Reached as reached:
        return reached.bindings
    return frozenset()


class _Flow:
    def __init__(self, name: str, target: ast.stmt) -> None:
        self._name = name
        self._target = target
        self._left: list[set[Binding]] = []  # what each enclosing loop is left or continued with

    def block(self, statements: list[ast.stmt], bindings: Bindings) -> Bindings:
        for statement in statements:
            bindings = self._statement(statement, bindings)
        return bindings

    def _statement(self, statement: ast.stmt, before: Bindings) -> Bindings:
        if statement is self._target:
            raise _Reached(self._at_header(statement, before))
        match statement:
            case ast.If(body=body, orelse=orelse):
                before = self._walrus([statement.test], statement, before)
                return self.block(body, before) | self.block(orelse, before)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, before)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                bound = any(names(item.optional_vars, self._name) for item in items if item.optional_vars is not None)
                return self.block(body, frozenset({statement}) if bound else before)
            case ast.Try() | ast.TryStar():
                return self._try(statement, before)
            case ast.Match(cases=cases):
                return before.union(*(self.block(case.body, before) for case in cases))
            case ast.Return() | ast.Raise():
                return frozenset()
            case ast.Break() | ast.Continue():
                if self._left:
                    self._left[-1] |= before
                return frozenset()
        return frozenset({statement}) if binds(statement, self._name) else before

    def _at_header(self, statement: ast.stmt, before: Bindings) -> Bindings:
        """A test of `while` is evaluated after every iteration too; everything else only once."""
        if not isinstance(statement, ast.While):
            return before
        again = _Flow(self._name, _NOWHERE)
        again._left.append(set())
        return before | again.block(statement.body, before) | again._left[-1]

    def _loop(self, loop: LOOPS, before: Bindings) -> Bindings:
        bound = not isinstance(loop, ast.While) and names(loop.target, self._name)
        # What one iteration leaves behind may be what the next one begins with.
        self._left.append(set())
        again = _Flow(self._name, _NOWHERE)
        again._left.append(set())
        once = again.block(loop.body, frozenset({loop}) if bound else before) | again._left[-1]
        start: Bindings = frozenset({loop}) if bound else before | once
        after = self.block(loop.body, start) | self._left.pop()
        return self.block(loop.orelse, before | after)

    def _try(self, statement: ast.Try | ast.TryStar, before: Bindings) -> Bindings:
        after = self.block(statement.body, before)
        anywhere = before.union(
            *({inner} for part in statement.body for inner in own_statements(part) if binds(inner, self._name))
        )
        handled = [self.block(handler.body, anywhere) for handler in statement.handlers]
        return self.block(statement.finalbody, self.block(statement.orelse, after).union(*handled))

    def _walrus(self, expressions: list[ast.expr], statement: ast.stmt, before: Bindings) -> Bindings:
        return frozenset({statement}) if any(_walrus_in(part, self._name) for part in expressions) else before


_NOWHERE: Final = ast.Pass()


def own_statements(body: ast.AST) -> Iterator[ast.stmt]:
    """A statement and those inside it, or the statements of a function; not those of functions and classes within."""
    if isinstance(body, ast.stmt) and not isinstance(body, FUNCTIONS):
        yield body
    for child in ast.iter_child_nodes(body):
        if isinstance(child, FUNCTIONS | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from own_statements(child)


def binds(statement: ast.stmt, name: str) -> bool:
    """Whether a statement itself, not a block inside it, binds a name."""
    match statement:
        case ast.Assign(targets=targets):
            found = any(names(target, name) for target in targets)
        case ast.AnnAssign(target=target, value=value):
            found = value is not None and names(target, name)
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.AsyncFor(target=target):
            found = names(target, name)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            found = any(names(item.optional_vars, name) for item in items if item.optional_vars is not None)
        case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own):
            return own == name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return any((alias.asname or alias.name.split(".")[0]) == name for alias in aliases)
        case _:
            found = False
    if found or isinstance(statement, ast.If | LOOPS | ast.Try | ast.With | ast.AsyncWith | ast.Match):
        return found
    return _walrus_in(statement, name)


def names(target: ast.expr, name: str) -> bool:
    """Whether a target of an assignment binds a plain name; `x[0]` and `x.y` do not bind `x`."""
    match target:
        case ast.Name(id=own):
            return own == name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(names(part, name) for part in parts)
        case ast.Starred(value=value):
            return names(value, name)
    return False


def _walrus_in(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.NamedExpr) and part.target.id == name for part in ast.walk(node))


def function_body(frame: Frame) -> ast.AST | None:
    """The syntax of the function or module that a frame runs; None for lambdas and comprehensions."""
    tree = frame.tree
    if tree is None or frame.function == "<module>":
        return tree
    return function_of(tree, frame.live.f_code)


def parameters(frame: Frame) -> frozenset[str]:
    code = frame.live.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred])


def assignments(frame: Frame, name: str) -> list[ast.AST]:
    """Every statement of the frame's own function that may have given a name its value; ENTRY for a parameter."""
    body = function_body(frame)
    if body is None:
        return [ENTRY] if name in parameters(frame) else []
    if frame.statement is None or not isinstance(body, FUNCTIONS | ast.Module):
        return []
    found = reaching(body.body, name, frame.statement)
    if len(found) > 1:
        found = frozenset(each for each in found if not _has_never_run(each, body, frame)) or found
    if found == {ENTRY} and name not in parameters(frame):
        return []
    return sorted(found, key=lambda node: getattr(node, "lineno", 0))


def _has_never_run(binding: ast.AST, body: ast.AST, frame: Frame) -> bool:
    """Whether a binding cannot have run yet: a name that is bound before it, in the same block, has no value.

    So it is in the first round of a loop, for the statements behind the one that the frame is at.
    """
    block = next((each for part in ast.walk(body) for each in blocks(part) if binding in each), [])
    before = block[: block.index(binding) + 1] if binding in block else []
    targets = [target for each in before if isinstance(each, ast.Assign) for target in each.targets]
    parts = [part for target in targets for part in ast.walk(target)]
    bound = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    unbound = bound - frame.variables.keys()
    return bool(unbound) and not any(
        isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del) and part.id in unbound for part in ast.walk(body)
    )


def assignment_before(frame: Frame, name: str) -> ast.AST | None:
    """The statement that gave a name its value at the line that a frame is at; a loop header counts as one."""
    found = [node for node in assignments(frame, name) if node is not ENTRY]
    return header(found[0]) if len(found) == 1 else None


def header(statement: ast.AST) -> ast.AST:
    """The node that stands for a binding in a report: of a loop, the expression that it goes over."""
    return statement.iter if isinstance(statement, ast.For | ast.AsyncFor) else statement
