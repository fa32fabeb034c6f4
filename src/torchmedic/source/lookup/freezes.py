"""Lines that freeze parameters, and whether any line may thaw them again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.safe_eval import UNKNOWN, read
from torchmedic.source.syntax import FUNCTIONS, callee, calls_in, innermost, nodes_in, syntax_tree
from torchmedic.source.user_variables import loaded_files, user_trees


def where_frozen(frames: list[Frame], frozen: Iterable[torch.Tensor]) -> Location | None:
    """The line that freezes these parameters; among several, one that is seen to be about them."""
    wanted = {id(tensor) for tensor in frozen}
    files = list(dict.fromkeys([*(frame.file for frame in reversed(frames) if frame.is_user), *loaded_files()]))
    switches = _switches(files)
    trees = {file: syntax_tree(file) or ast.Module([], []) for file in files}
    told = [(file, *each) for file, tree in trees.items() for each in _told_to_freeze(tree, switches)]
    names = [callee(call) for _, call, *_ in told]
    found: list[tuple[tuple[int, bool], Location]] = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            owner = _frozen_by(node, tree)
            if owner is not None:
                location = node_location("cause", file, node, "parameters are frozen here")
                around = innermost(tree, node.lineno, FUNCTIONS) if isinstance(node, ast.expr | ast.stmt) else None
                is_told = around is not None and names.count(getattr(around, "name", "")) == 1
                found.append(((_relevance(owner, frames, wanted), not is_told), location))
    for file, call, owner, is_certain in told:
        location = node_location("cause", file, call, "told to freeze parameters here")
        found.append(((_relevance(owner, frames, wanted), is_certain), location))
    return max(found, key=lambda pair: pair[0])[1] if found else None


class _Switch(NamedTuple):
    """A function that freezes what it is given, or sets `requires_grad` to what it is told."""

    parameters: list[str]
    about: str  # the parameter whose weights are switched; empty for something else
    flag: str  # the parameter that says whether to freeze; empty if the function always does
    freezes_if: bool  # the value of `flag` that freezes


def _told_to_freeze(tree: ast.Module, switches: dict[str, _Switch]) -> Iterator[tuple[ast.Call, ast.expr, bool]]:
    """Calls of functions that freeze, what they are told to freeze, and whether they do: a flag may be computed."""
    for node in ast.walk(tree):
        switch = switches.get(callee(node) or "") if isinstance(node, ast.Call) else None
        if switch is None or not isinstance(node, ast.Call):
            continue
        names = switch.parameters[isinstance(node.func, ast.Attribute) and switch.parameters[:1] == ["self"] :]
        given = dict(zip(names, node.args, strict=False)) | {word.arg or "": word.value for word in node.keywords}
        is_certain = not switch.flag or _is_constant(given.get(switch.flag), switch.freezes_if)
        if is_certain or not isinstance(given.get(switch.flag), ast.Constant | None):
            yield node, given.get(switch.about, node.func), is_certain


def _switches(files: list[str]) -> dict[str, _Switch]:
    """The functions of some files that freeze what they are given, by name."""
    found: dict[str, _Switch] = {}
    for file in files:
        for function in nodes_in(syntax_tree(file)):
            if not isinstance(function, FUNCTIONS):
                continue
            parameters = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            for node in ast.walk(function):
                owner, given = _switched(node)
                if owner is None:
                    continue
                names = [part.id for part in _names(_looped_over(owner, node, function))]
                about = next((name for name in names if name in parameters and name != "self"), "")
                match given:
                    case ast.Name(id=flag) if flag in parameters:
                        found[function.name] = _Switch(parameters, about, flag, False)
                    case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=flag)) if flag in parameters:
                        found[function.name] = _Switch(parameters, about, flag, True)
                    case ast.Constant(value=False) if about:
                        found[function.name] = _Switch(parameters, about, "", False)
    return found


def _frozen_by(node: ast.AST, tree: ast.Module) -> ast.expr | None:
    """What a statement freezes: `model` of `model.requires_grad_(False)`, and of a loop over its parameters."""
    owner, given = _switched(node)
    # A value that is computed can be False; a plain name is an argument of a function that is told to freeze.
    if owner is None or not (_is_constant(given, False) or not isinstance(given, ast.Constant | ast.Name)):
        return None
    return _looped_over(owner, node, tree)


def _looped_over(owner: ast.expr, node: ast.AST, tree: ast.AST) -> ast.expr:
    """`model` of `for p in model.parameters()` around a node, if the owner is `p`."""
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and isinstance(owner, ast.Name) and any(part is node for part in ast.walk(loop)):
            source = loop.iter.func.value if _is_method(loop.iter) else loop.iter  # type: ignore[attr-defined]
            return source if any(part.id == owner.id for part in _names(loop.target)) else owner
    return owner


def _switched(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """What a statement sets `requires_grad` of, and to what."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr="requires_grad")], value=given):
            return owner, given
        case ast.Call(func=ast.Attribute(value=owner, attr="requires_grad_"), args=args, keywords=keywords):
            return owner, next(iter([*args, *(word.value for word in keywords)]), ast.Constant(True))
    return None, None


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_condition(node: ast.expr | None) -> bool:
    """A choice by name, such as `"lora" in name`, which freezes all that it does not name."""
    return node is not None and any(
        isinstance(part, ast.Compare) or (isinstance(part, ast.Call) and callee(part) in ("startswith", "endswith"))
        for part in ast.walk(node)
    )


def is_never_thawed() -> bool:
    """Whether no line of the user's files may set `requires_grad` of something that is frozen."""
    trees = [tree for _, tree in user_trees()]
    switches = _switches([file for file, _ in user_trees()])
    freezing = {call for tree in trees for call, _, is_certain in _told_to_freeze(tree, switches) if is_certain}
    calls = {call for tree in trees for call in calls_in(tree, *switches)} if switches else set()
    told = switches.keys() - {callee(call) for call in calls - freezing}  # only ever told to freeze
    for tree in trees:
        for node in nodes_in(tree):
            owner, given = _switched(node)
            is_told = isinstance(given, ast.Name) and _name_of_function(tree, node) in told
            if owner is not None and not (_is_constant(given, False) or _is_condition(given) or is_told):
                return False
            if isinstance(node, ast.Constant) and node.value == "requires_grad":
                return False  # for `setattr`
    return True


def _name_of_function(tree: ast.Module, node: ast.AST) -> str:
    around = innermost(tree, getattr(node, "lineno", 0), FUNCTIONS)
    return around.name if isinstance(around, FUNCTIONS) else ""


def _is_method(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _names(node: ast.expr) -> Iterator[ast.Name]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


def _relevance(owner: ast.expr, frames: list[Frame], wanted: set[int]) -> int:
    """1 if the owner is known to hold some of the parameters, 0 if it is not known, -1 if it holds others."""
    for frame in reversed(frames):
        value = read(owner, frame) if frame.is_user else UNKNOWN
        if isinstance(value, torch.nn.Module):
            return 1 if any(id(tensor) in wanted for tensor in value.parameters()) else -1
        if isinstance(value, torch.Tensor):
            return 1 if id(value) in wanted else -1
    return 0
