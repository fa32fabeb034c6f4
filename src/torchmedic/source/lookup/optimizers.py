"""Where an optimizer, its learning rate and its schedule come from in the user's code."""

from __future__ import annotations

import ast
import gc
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import Frame, node_location, place, syntax_tree
from torchmedic.source.syntax import nodes_in


def _files(frames: list[Frame]) -> list[str]:
    """The user's files that are on the stack, the innermost first, then the script itself."""
    return list(dict.fromkeys(frame.file for frame in reversed(frames) if frame.is_user))


def built_at(frames: list[Frame], optimizer: Any, role: Role, label: str) -> Location | None:
    """The only call in the user's files that builds an optimizer of this kind."""
    name = type(optimizer).__name__
    for file in _files(frames):
        tree = syntax_tree(file)
        calls = [
            node
            for node in nodes_in(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
        ]
        if len(calls) > 1:
            calls = _of_this_one(frames, calls, tree, optimizer) or calls
        if len(calls) == 1:
            return node_location(role, file, calls[0], label)
    return None


def _of_this_one(frames: list[Frame], calls: list[ast.Call], tree: Any, optimizer: Any) -> list[ast.Call]:
    """The calls whose result is assigned to a name that holds the optimizer."""
    names = {name for frame in frames if frame.is_user for name, value in frame.variables.items() if value is optimizer}
    for frame in frames:
        owner = frame.variables.get("self") if frame.is_user else None
        names |= {
            f"self.{attr}" for attr, value in (getattr(owner, "__dict__", None) or {}).items() if value is optimizer
        }
    return [
        call
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) in names for target in node.targets)
        for call in calls
        if call is node.value
    ]


def rate_set_at(frames: list[Frame], optimizer: Any, role: Role, label: str) -> Location | None:
    """What gives the optimizer its learning rate: an assignment to `["lr"]`, a schedule's function, a schedule."""
    for file in _files(frames):
        tree = syntax_tree(file)
        made = [
            node
            for node in nodes_in(tree)
            if isinstance(node, ast.Assign | ast.AugAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Subscript) and ast.unparse(target.slice) in ("'lr'", '"lr"')
        ]
        if len(made) == 1:
            return node_location(role, file, made[0], label)
    for scheduler in schedulers_of(optimizer):
        for function in getattr(scheduler, "lr_lambdas", ()):
            code = getattr(function, "__code__", None)
            if code is not None:
                lines = [line for *_, line in code.co_lines() if line is not None]
                return place(role, code.co_filename, max(lines, default=code.co_firstlineno), label)
        found = built_at(frames, scheduler, role, label)
        if found is not None:
            return found
    return built_at(frames, optimizer, role, label)


def schedulers_of(optimizer: Any) -> list[Any]:
    return [
        value
        for value in gc.get_objects()
        if issubclass(type(value), LRScheduler) and getattr(value, "optimizer", None) is optimizer
    ]
