"""Where an optimizer, its learning rate and its schedule come from in the user's code."""

from __future__ import annotations

import ast
import math
import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from torchmedic.records import Location, Role
from torchmedic.source.assignments import items_written
from torchmedic.source.live_frames import Frame, by_span, node_location, place, position_of
from torchmedic.source.lookup.named_numbers import is_number, rate_passed_at, written_at
from torchmedic.source.objects.living import living
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import PACKAGE, is_user_file
from torchmedic.source.user_variables import loaded_files, user_trees

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Construction(NamedTuple):
    """The user's call that built an optimizer."""

    code: CodeType
    lasti: int
    is_direct: bool  # False: a library built the optimizer for the user


def construction(frame: FrameType | None, kind: type) -> Construction | None:
    """The innermost call of the user's code, asked while an optimizer of some class is built."""
    own = [code for each in kind.__mro__ if (code := getattr(vars(each).get("__init__"), "__code__", None))]
    is_direct = True
    while frame is not None:
        code = frame.f_code
        if code in own:
            pass  # an optimizer that is not torch's
        elif is_user_file(code.co_filename):
            return Construction(code, frame.f_lasti, is_direct)
        elif not code.co_filename.startswith((_TORCH, PACKAGE)):
            is_direct = False
        frame = frame.f_back
    return None


def built_at(
    frames: list[Frame],
    optimizer: Any,
    role: Role,
    label: str,
    *,
    by: Construction | None = None,
    value: float | None = None,
    group: int | None = None,
) -> Location | None:
    """The call in the user's files that built an optimizer or a schedule.

    Args:
        frames: Live ones.
        optimizer: What was built.
        role: Of the location.
        label: Of the location.
        by: The call, where it was seen.
        value: The setting that is to blame: where the call spells it out, the location is the value.
        group: The group of parameters that is to blame: where the call spells it out, the location is in it.
    """
    if by is not None:
        file = by.code.co_filename
        written = written_at(value) if value is not None else None
        if not by.is_direct and written is not None:
            return node_location(role, *written, label)
        line, end_line, column, end_column = position_of(by.code, by.lasti)
        tree = syntax_tree(file)
        nodes = None
        if tree is not None and line and end_line and column is not None and end_column is not None:
            nodes = by_span(tree).get((line, column, end_line, end_column))
        if nodes:
            file, node = _group_of(optimizer, group, nodes[0]) or (file, nodes[0])
            return node_location(role, file, _value_in(node, value) or node, label)
        if line:
            return place(role, file, line, label)
    name = type(optimizer).__name__
    for file in _files(frames):
        tree = syntax_tree(file)
        every = [node for node in nodes_in(tree) if isinstance(node, ast.Call)]
        calls = [call for call in every if ast.unparse(call.func).split(".")[-1] == name]
        if len(calls) != 1:
            calls = _of_this_one(frames, calls or every, tree, optimizer) or calls
        if len(calls) == 1:
            return node_location(role, file, _value_in(calls[0], value) or calls[0], label)
    return None


def _files(frames: list[Frame]) -> list[str]:
    """The user's files that are on the stack, the innermost first, then the others that are imported."""
    live = [frame.file for frame in reversed(frames) if frame.is_user]
    return list(dict.fromkeys([*live, *loaded_files()]))


def _value_in(call: ast.AST, value: float | None) -> ast.AST | None:
    """The number inside a call, where it is there once."""
    found = [node for node in ast.walk(call) if value is not None and is_number(node, value)]
    return found[0] if len(found) == 1 else None


def _group_of(optimizer: Any, group: int | None, call: ast.AST) -> tuple[str, ast.AST] | None:
    """The dict of one group of parameters: the only list of so many, in the call or anywhere in the user's files."""
    if group is None:
        return None
    groups = [
        (file, node.elts)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.List) and len(node.elts) == len(optimizer.param_groups)
        if all(
            isinstance(each, ast.Dict) and "'params'" in map(ast.unparse, filter(None, each.keys)) for each in node.elts
        )
    ]
    inside = [found for found in groups if found[1][0] in ast.walk(call)]
    groups = inside or groups
    return (groups[0][0], groups[0][1][group]) if len(groups) == 1 else None


def _of_this_one(frames: list[Frame], calls: list[ast.Call], tree: ast.AST | None, optimizer: Any) -> list[ast.Call]:
    """The calls whose result is assigned to a name that holds the optimizer."""
    names = {
        name
        for frame in frames
        if frame.is_user
        for name, value in frame.variables.items()
        if value is optimizer or _wrapped(value) is optimizer
    }
    for frame in frames:
        owner = frame.variables.get("self") if frame.is_user else None
        names |= {
            f"self.{attr}" for attr, value in (getattr(owner, "__dict__", None) or {}).items() if value is optimizer
        }
    return [
        call
        for node in nodes_in(tree)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) in names for target in node.targets)
        for call in calls
        if call is node.value
    ]


def _wrapped(value: Any) -> Any:
    """The schedule in the wrapper that accelerate puts around it."""
    is_wrapper = type(value).__module__.startswith("accelerate.")
    return getattr(value, "__dict__", {}).get("scheduler") if is_wrapper else None


def rate_set_at(
    frames: list[Frame],
    optimizer: Any,
    role: Role,
    label: str,
    *,
    by: Construction | None = None,
    value: float | None = None,
    group: int | None = None,
) -> Location | None:
    """What gives the optimizer its learning rate: an assignment to `["lr"]`, a schedule's function, a schedule."""
    found = setting_assigned_at(frames, "lr", role, label)
    if found is not None:
        return found
    # A schedule that has never been advanced has changed nothing.
    for scheduler in sorted(schedulers_of(optimizer), key=lambda each: getattr(each, "last_epoch", 0) <= 0):
        for function in getattr(scheduler, "lr_lambdas", ()):
            code = getattr(function, "__code__", None)
            if code is not None and is_user_file(code.co_filename):
                return place(role, code.co_filename, returning_line(function, scheduler, value), label)
        found = built_at(frames, scheduler, role, label, value=peak_of(optimizer, group))
        if found is not None:
            return found
    return built_at(frames, optimizer, role, label, by=by, value=value, group=group)


def rate_given_at(
    frames: list[Frame], optimizer: Any, rate: float, *, by: Construction | None = None, group: int | None = None
) -> Location | None:
    """The cause of a learning rate: the construction of the optimizer, or a schedule that went above that."""
    peak, base = peak_of(optimizer, group), base_of(optimizer, rate, group)
    highest = next(((name, each) for name, each in (("peak", peak), ("base", base)) if each and rate < each), None)
    label = f"the learning rate is {rate:.6g}" + (f", and its {highest[0]} {highest[1]:.6g}" if highest else "")
    find, value = (rate_set_at, rate) if peak is not None or base is None else (built_at, base)
    if find is built_at and by is not None and not by.is_direct and written_at(value) is None:
        passed = rate_passed_at()  # a library builds the optimizer, and no file spells the rate out
        if passed is not None:
            return node_location("cause", *passed, label)
    return find(frames, optimizer, "cause", label, by=by, value=value, group=group)


def base_of(optimizer: Any, rate: float, group: int | None = None) -> float | None:
    """The rate that the optimizer was built with, which a schedule has made `rate` of; None if none is as high."""
    groups = optimizer.param_groups if group is None else [optimizer.param_groups[group]]
    given = [*(each.get("initial_lr") for each in groups), optimizer.defaults.get("lr")]
    bases = [float(each) for each in given if each is not None and 0 <= rate <= float(each) * 1.001]
    return min(bases) if bases else None


def peak_of(optimizer: Any, group: int | None = None) -> float | None:
    """The highest rate of a `OneCycleLR`, which also replaces the rate that the optimizer was built with."""
    peak = optimizer.param_groups[group or 0].get("max_lr")
    return float(peak) if isinstance(peak, int | float) and schedulers_of(optimizer) else None


def setting_assigned_at(frames: list[Frame], name: str, role: Role, label: str) -> Location | None:
    """The only assignment to a setting of the groups of an optimizer: `group["lr"] = ...`."""
    for file in _files(frames):
        made = [node for node, item in items_written(syntax_tree(file)) if ast.unparse(item.slice) == repr(name)]
        if len(made) == 1:
            return node_location(role, file, made[0], label)
    return None


def schedulers_of(optimizer: Any) -> list[Any]:
    return [each for each in living(LRScheduler) if getattr(each, "optimizer", None) is optimizer]


def advanced_at(frames: list[Frame], schedule: Any, caller: Place) -> Place:
    """The line that has a schedule advance: a call of `step`, or what tells a framework how often to call it."""
    calls = [node for node in nodes_in(syntax_tree(caller.file)) if isinstance(node, ast.Call)]
    if any(callee(call) == "step" and has_line(call, caller.line) for call in calls):
        return caller
    for file, tree in user_trees():
        for node in nodes_in(tree):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            for key, value in pairs:
                if isinstance(key, ast.Constant) and key.value == "interval" and isinstance(value, ast.Constant):
                    return Place(file, value.lineno)
    built = built_at(frames, schedule, "cause", "")
    return Place(built.file, built.line) if built is not None else caller


_MAX_EPOCHS = 200  # before the present one that a function is asked about


def returning_line(function: Any, scheduler: Any, rate: float | None) -> int:
    """The line of a schedule's function that returned a rate; its last line where that is not found."""
    code: CodeType = function.__code__
    returned = code.co_firstlineno

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal returned
        if event == "return" and frame.f_code is code:
            returned = frame.f_lineno
        return follow if frame.f_code is code else None

    bases = getattr(scheduler, "base_lrs", ())
    last = getattr(scheduler, "last_epoch", 0)
    before = sys.gettrace()
    sys.settrace(follow)
    try:
        for epoch in range(last, max(-1, last - _MAX_EPOCHS), -1):
            factor = float(function(epoch))
            if rate is not None and any(math.isclose(base * factor, rate, rel_tol=1e-4) for base in bases):
                return returned
    except Exception:
        pass  # a function of the script that cannot be asked about another epoch
    finally:
        sys.settrace(before)
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)
