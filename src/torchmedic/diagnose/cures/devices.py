"""Bring a stray tensor home and replay the step: the cure that the reason calls for, else a move where it is used."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.diagnose.cures.edits import called, rewritten, statement_at, whole
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.devices.device_births import device_words, word_for
from torchmedic.evidence.devices.placement import Split
from torchmedic.evidence.devices.stray_reasons import FACTORIES, reasons_of
from torchmedic.evidence.devices.strays import Reason, Stray, items_of
from torchmedic.records import Treatment
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.step.trial import Edit, attempt, describe, edited, passes
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.objects.living import live_modules
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import callee

_TO_ITS_END = "the step runs to its end"


def explained(failure: StepFailure, split: Split, strays: list[Stray]) -> tuple[Reason | None, Treatment | None]:
    """The reason whose cure lets the step run through, with that cure; else the likeliest, and a move at the use."""
    reasons = reasons_of(strays)
    first = reasons[0][1] if reasons else None
    if failure.step is None:
        return first, None
    for stray, reason in reasons:
        with contextlib.suppress(RuntimeError):  # no room on the device for a copy; `meta` has no values to compare
            treated = _by_reason(failure.step, split, stray, reason)
            if treated is not None:
                return reason, treated
    with contextlib.suppress(RuntimeError):
        return first, _by_move(failure.step, split, strays[0])
    return first, None


def _by_reason(step: Step, split: Split, stray: Stray, reason: Reason) -> Treatment | None:
    for edit in _edits(split, reason):
        verdict = attempt(step, edit)
        if verdict.passed:
            return _treated(reason.advice, verdict.result, verdict.patch)
    moving = _moving(split, stray, reason)
    if moving is None:
        return None
    with moving:
        played: ReplayResult = step.again()
    return _treated(reason.advice, describe(played), _patch(reason)) if passes(played) else None


def _by_move(step: Step, split: Split, stray: Stray) -> Treatment | None:
    for title, edit in _at_its_use(split, stray):
        verdict = attempt(step, edit)
        if verdict.passed:
            return _treated(title, verdict.result, verdict.patch)
    return None


def _treated(title: str, result: str, patch: str) -> Treatment:
    shown = _TO_ITS_END if result.startswith("no loss") else result  # `meta` holds no values
    return Treatment(title=title, safety="edit", proven=True, result=shown, patch=patch)


def _edits(split: Split, reason: Reason) -> Iterator[Edit]:
    if reason.kind == "made":
        yield from _told_the_device(split, reason)
    elif reason.kind == "dropped":
        statement: Any = reason.nodes[0]
        text = rewritten(reason.file, statement)
        yield Edit(
            spot_of_node(reason.file, statement), f"{rewritten(reason.file, statement.value.func.value)} = {text}"
        )
    elif reason.kind == "taken off":
        call: Any = reason.nodes[0]
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            yield Edit(spot_of_node(reason.file, call), rewritten(reason.file, call.func.value))


def _told_the_device(split: Split, reason: Reason) -> Iterator[Edit]:
    """`torch.zeros(4)` becomes `torch.zeros(4, device=x.device)`, all those of one statement at once."""
    word = word_for(split.home, reason.words)
    calls = [node for node in reason.nodes if isinstance(node, ast.Call)]
    statement = statement_at(spot_of_node(reason.file, calls[0])) if calls and word is not None else None
    if statement is None or word is None:
        return
    inside = [call for call in calls if any(part is call for part in ast.walk(statement))]
    outermost = [call for call in inside if not any(call is not other and _in(call, other) for other in inside)]
    changes = [(call, _on_device(reason.file, call, word)) for call in outermost]
    yield Edit(whole(spot_of_node(reason.file, calls[0]), statement), rewritten(reason.file, statement, changes))


def _in(part: ast.AST, node: ast.AST) -> bool:
    return any(inner is part for inner in ast.walk(node))


def _on_device(file: str, call: ast.Call, word: str) -> str:
    given = next((each for each in call.keywords if each.arg == "device"), None)
    if given is not None:
        return rewritten(file, call, [(given.value, word)])
    text = rewritten(file, call)
    if callee(call) not in FACTORIES:
        return f"{text}.to({word})"
    inner = text.removesuffix(")").rstrip().removesuffix(",")
    return f"{inner}, device={word})"


def _at_its_use(split: Split, stray: Stray) -> Iterator[tuple[str, Edit]]:
    """`x` becomes `x.to(other.device)` in the line that failed."""
    node, frame = stray.placed.node, stray.placed.frame
    if node is None or frame is None or not hasattr(node, "lineno"):
        return
    others = [each for each in split.tensors if each.device == split.home and each.frame is frame and each.node]
    words = [f"{each.text}.device" for each in others if isinstance(each.node, ast.Name | ast.Attribute)]
    named = word_for(split.home, device_words(frame.live))
    text = called(rewritten(frame.file, node), node)
    for word in dict.fromkeys([*words, *([named] if named is not None else [])]):
        moved = f"{text}.to({word})"
        yield f"move it where it is used: `{moved}`", Edit(spot_of_node(frame.file, node, frame.function), moved)


def _moving(split: Split, stray: Stray, reason: Reason) -> contextlib.AbstractContextManager[None] | None:
    home = split.home
    if reason.kind in ("attribute", "container", "layers"):
        return _attributes_moved(reason.owner, reason.name, home)
    if reason.kind == "module" and reason.module is not None:
        return _module_moved([reason.module], stray.device if home.type == "cpu" else home)
    return None


@contextlib.contextmanager
def _attributes_moved(owner: Any, name: str, home: torch.device) -> Iterator[None]:
    """The line that makes an attribute makes it for every module of the class."""
    alike = [each for each in live_modules() if type(each) is type(owner) and name in each.__dict__]
    with contextlib.ExitStack() as moved:
        for each in {id(one): one for one in (owner, *alike)}.values():
            moved.enter_context(_attribute_moved(each, name, home))
        yield


@contextlib.contextmanager
def _attribute_moved(owner: Any, name: str, home: torch.device) -> Iterator[None]:
    """What `.to()` would have done, had the module known of this attribute."""
    original = owner.__dict__[name]
    modules: list[torch.nn.Module] = []
    owner.__dict__[name] = _moved(original, home, modules)
    try:
        with _module_moved(modules, home):
            yield
    finally:
        owner.__dict__[name] = original


def _moved(value: Any, home: torch.device, modules: list[torch.nn.Module], depth: int = 4) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(home)
    if isinstance(value, torch.nn.Module):
        modules.append(value)
        return value
    if not depth or not items_of(value):
        return value
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: _moved(item, home, modules, depth - 1) for key, item in value.items()})
        return moved
    if type(value) in (list, tuple, set):
        return type(value)(_moved(item, home, modules, depth - 1) for item in value)
    if isinstance(value, tuple):
        return value
    moved = copy.copy(value)
    for key, item in list(vars(value).items()):
        object.__setattr__(moved, key, _moved(item, home, modules, depth - 1))
    return moved


@contextlib.contextmanager
def _module_moved(modules: list[torch.nn.Module], home: torch.device) -> Iterator[None]:
    """Copies of the parameters and buffers on another device in their place, for a while."""
    originals: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    try:
        for module in {id(part): part for each in modules for part in each.modules()}.values():
            for name, held in [*module._parameters.items(), *module._buffers.items()]:
                if held is None or held.device == home:
                    continue
                moved = copies.get(id(held))
                if moved is None:
                    moved = held.detach().to(home)
                    if isinstance(held, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, requires_grad=held.requires_grad)
                    copies[id(held)] = moved
                originals.append((module, name, held))
                setattr(module, name, moved)  # not into the dict: recurrent layers keep lists of their weights
        yield
    finally:
        for module, name, held in originals:
            setattr(module, name, held)


def _patch(reason: Reason) -> str:
    """The edit of source that has the same effect as the move that was tried; empty where it is not one line."""
    statement = reason.nodes[0] if reason.nodes else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    target, value = statement.targets[0], rewritten(reason.file, statement.value)
    if not isinstance(target, ast.Attribute) or ast.unparse(target) != f"self.{reason.name}":
        return ""
    if reason.kind == "attribute":
        text = f'self.register_buffer("{reason.name}", {value})'
    elif reason.kind == "layers" and isinstance(statement.value, ast.List | ast.ListComp | ast.Dict | ast.DictComp):
        kind = "ModuleDict" if isinstance(statement.value, ast.Dict | ast.DictComp) else "ModuleList"
        text = f"self.{reason.name} = nn.{kind}({value})"
    else:
        return ""
    place: Spot = spot_of_node(reason.file, statement)
    try:
        return edited(Edit(place, text))[1]
    except CannotCut:
        return ""
