"""Lines that freeze parameters, and whether any line may thaw them again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import torch

from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.safe_eval import UNKNOWN, read
from torchmedic.source.syntax import callee, nodes_in, syntax_tree
from torchmedic.source.user_variables import loaded_files, user_trees


def where_frozen(frames: list[Frame], frozen: Iterable[torch.Tensor]) -> Location | None:
    """The line that freezes these parameters; among several, one that is seen to be about them."""
    wanted = {id(tensor) for tensor in frozen}
    files = list(dict.fromkeys([*(frame.file for frame in reversed(frames) if frame.is_user), *loaded_files()]))
    found: list[tuple[int, Location]] = []
    for file in files:
        tree = syntax_tree(file) or ast.Module([], [])
        for node in ast.walk(tree):
            owner = _frozen_by(node, tree)
            if owner is not None:
                location = node_location("cause", file, node, "parameters are frozen here")
                found.append((_relevance(owner, frames, wanted), location))
        for call, owner in _told_to_freeze(tree, files):
            location = node_location("cause", file, call, "told to freeze parameters here")
            found.append((_relevance(owner, frames, wanted), location))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _told_to_freeze(tree: ast.Module, files: list[str]) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Calls with False of a function that sets `requires_grad` to what it is given, and what they are given besides."""
    flags = {
        function.name: [argument.arg for argument in function.args.args].index(node.value.id)
        for file in files
        for function in ast.walk(syntax_tree(file) or ast.Module([], []))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "requires_grad"
        and isinstance(node.value, ast.Name)
        and node.value.id in [argument.arg for argument in function.args.args]
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = callee(node)
        values = [*node.args, *(word.value for word in node.keywords)]
        if name in flags and any(isinstance(value, ast.Constant) and value.value is False for value in values):
            others = [value for value in values if not isinstance(value, ast.Constant)]
            yield node, others[0] if others else node.func


def _frozen_by(node: ast.AST, tree: ast.Module) -> ast.expr | None:
    """What a statement freezes: `model` of `model.requires_grad_(False)`, and of a loop over its parameters."""
    owner, given = _switched(node)
    # A value that is computed can be False; a plain name is an argument of a function that is told to freeze.
    if owner is None or not (_is_constant(given, False) or not isinstance(given, ast.Constant | ast.Name)):
        return None
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
    for _, tree in user_trees():
        for node in nodes_in(tree):
            owner, given = _switched(node)
            if owner is not None and not (_is_constant(given, False) or _is_condition(given)):
                return False
            if isinstance(node, ast.Constant) and node.value == "requires_grad":
                return False  # for `setattr`
    return True


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
