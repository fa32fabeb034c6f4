"""A state that was kept without a copy: it changed with every update, and to load it changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident, StateNotCopied
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.loads import OwnState
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, has_line, last_name, nodes_in, syntax_tree
from torchmedic.source.user_variables import user_trees

_COPIES = frozenset("deepcopy clone save load_state_dict".split())


def find(habits: Habits) -> Iterator[LoopIncident]:
    for each in habits.own_states[:1]:
        state = _given(each.place)
        if state is None or any(callee(call) == "state_dict" for call in ast.walk(state) if isinstance(call, ast.Call)):
            yield from _of_one_module(habits, each)  # it was taken in this very moment: there is nothing to restore
            continue
        taken = list(_taken())
        name = last_name(state.value if isinstance(state, ast.Subscript) else state)
        named = [place for place, target in taken if target == name]
        found = named or [place for place, _ in taken]
        yield StateNotCopied(
            step=habits.steps,
            cause=found[0] if len(set(found)) == 1 or named else each.place,
            loading=each.place,
            tensors=each.tensors,
        )


def _of_one_module(habits: Habits, own: OwnState) -> Iterator[LoopIncident]:
    """`a.load_state_dict(b.state_dict())`, where another line has made `a` and `b` two names of one module."""
    for call in nodes_in(syntax_tree(own.place.file)):
        match call:
            case ast.Call(
                func=ast.Attribute(value=receiver, attr="load_state_dict"),
                args=[ast.Call(func=ast.Attribute(value=giver, attr="state_dict"))],
            ) if has_line(call, own.place.line):
                names = {ast.unparse(receiver), ast.unparse(giver)}
            case _:
                continue
        same = [
            node
            for node in nodes_in(syntax_tree(own.place.file))
            if isinstance(node, ast.Assign) and {ast.unparse(node.targets[0]), ast.unparse(node.value)} == names
        ]
        if len(names) == 2 and len(same) == 1:
            yield StateNotCopied(
                step=habits.steps,
                cause=Place(own.place.file, same[0].lineno),
                loading=own.place,
                tensors=own.tensors,
                is_one_module=True,
            )
        return


def _given(loading: Place) -> ast.expr | None:
    """What the only call of `load_state_dict` on a line is given."""
    calls = [
        node
        for node in nodes_in(syntax_tree(loading.file))
        if isinstance(node, ast.Call) and has_line(node, loading.line) and callee(node) == "load_state_dict"
    ]
    return calls[0].args[0] if len(calls) == 1 and calls[0].args else None


def _taken() -> Iterator[tuple[Place, str]]:
    """The lines of the user's that keep the result of `state_dict()` without a copy, and the name that they give it."""
    keeper: ast.AST
    for file, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Assign(targets=[target, *_]):
                    keeper = target.value if isinstance(target, ast.Subscript) else target
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=keeper))):
                    pass  # `kept.update(...)`, `kept.append(...)`
                case ast.Return():
                    keeper = node  # without a name
                case _:
                    continue
            names = {callee(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
            if "state_dict" in names and names.isdisjoint(_COPIES):
                yield Place(file, node.lineno), last_name(keeper)
