"""Layers and parameters that the forward pass makes anew, so that each step has random ones and none is trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from torchmedic.detect.loop.incident import LayerMadeAnew, LoopIncident
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, callee, calls_in, last_name, nodes_in
from torchmedic.source.user_variables import user_trees

_MIN_STEPS = 3  # each with parameters of its own
_KINDS = ("linear", "conv", "rnn", "sparse", "batchnorm", "normalization", "instancenorm", "transformer")
_OF_GRADIENTS = ("grad", "backward")  # that a function computes for itself, as to adapt a head to a task


def find(habits: Habits, steps: list[Event]) -> Iterator[LoopIncident]:
    if len({each.step for each in habits.reach.short_lived()}) < _MIN_STEPS:
        return
    for file, call in _makers():
        yield LayerMadeAnew(
            step=steps[-1].step,
            cause=Place(file, call.lineno),
            what=ast.unparse(call.func),
            update=steps[-1].place,
            updates=len(steps),
        )
        return


def _makers() -> Iterator[tuple[str, ast.Call]]:
    """The calls that make a layer or a parameter in the forward pass of a module of the user's."""
    classes = [(file, node) for file, tree in user_trees() for node in nodes_in(tree) if isinstance(node, ast.ClassDef)]
    modules = {node.name for _, node in classes if any("Module" in last_name(base) for base in node.bases)}
    for file, node in classes:
        for method in _of_forward(node) if node.name in modules else ():
            if not any(calls_in(method, *_OF_GRADIENTS)):
                yield from ((file, call) for call in calls_in(method) if _makes(call, modules))


def _of_forward(node: ast.ClassDef) -> list[ast.stmt]:
    """The method `forward` of a class, and the methods that it calls."""
    methods = {each.name: each for each in node.body if isinstance(each, FUNCTIONS)}
    found: dict[str, ast.stmt] = {}
    pending = ["forward"]
    while pending:
        name = pending.pop()
        if name in methods and name not in found:
            found[name] = methods[name]
            pending += [callee(call) for call in calls_in(methods[name])]
    return list(found.values())


def _makes(call: ast.Call, modules: set[str]) -> bool:
    name = callee(call)
    kind = getattr(nn, name, None)
    is_layer = isinstance(kind, type) and kind.__module__.rpartition(".")[2] in _KINDS
    is_new = name == "Parameter" and bool(call.args) and isinstance(call.args[0], ast.Call)  # it wraps no old tensor
    return is_layer or is_new or name in modules or name == "MultiheadAttention"
