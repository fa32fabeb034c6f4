"""Parameters that cannot get a gradient: the statement that froze them, or that made them without one."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.carried_tensors import carrier_of
from torchmedic.records import Location
from torchmedic.replay.trace.older_graph import Import, named
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.safe_eval import UNKNOWN, read
from torchmedic.source.spots import spot_of_traced
from torchmedic.source.syntax import callee, syntax_tree
from torchmedic.source.user_variables import loaded_files


def parameters_in_reach(failure: BackwardFailure) -> list[torch.Tensor]:
    """The parameters of the optimizers and of the modules that the step's frame can see."""
    if failure.step is None:
        return []
    runner = failure.step.runner
    found = [*runner.parameters, *(tensor for module in runner.modules for tensor in module.parameters())]
    return list({id(tensor): tensor for tensor in found}.values())


def leaves_in_reach(failure: BackwardFailure) -> list[torch.Tensor]:
    """Plain tensors that collect gradients, of a functional model."""
    values: list[Any] = []
    for frame in failure.evidence.frames:
        if frame.is_user:
            values += [*frame.variables.values(), *frame.live.f_globals.values()]
    items = [part for value in values if isinstance(value, list | tuple) for part in value]
    items += [part for value in values if isinstance(value, dict) and len(value) < 200 for part in value.values()]
    return [
        value
        for value in [*values, *items]
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    ]


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
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        # A value that is computed can be False; a plain name is an argument of a function that is told to freeze.
        off = (
            node.value.value is False if isinstance(node.value, ast.Constant) else not isinstance(node.value, ast.Name)
        )
        if not (off and isinstance(target, ast.Attribute) and target.attr == "requires_grad"):
            return None
        owner = target.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        given = node.args[0] if node.args else next((word.value for word in node.keywords), None)
        if not (isinstance(given, ast.Constant) and given.value is False):
            return None
        owner = node.func.value
    else:
        return None
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and isinstance(owner, ast.Name) and any(part is node for part in ast.walk(loop)):
            source = loop.iter.func.value if _is_method(loop.iter) else loop.iter  # type: ignore[attr-defined]
            return source if any(part.id == owner.id for part in _names(loop.target)) else owner
    return owner


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


@contextlib.contextmanager
def unfrozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """What the step is like with these parameters trainable; for a trial."""
    frozen = [
        tensor for tensor in parameters if tensor.is_leaf and tensor.is_floating_point() and not tensor.requires_grad
    ]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def never_trainable(
    failure: BackwardFailure, provenance: Provenance, root: torch.Tensor
) -> tuple[str, torch.Tensor, Location] | None:
    """A tensor behind the loss that was there before the step and was made without requires_grad, where it was made.

    Those that an optimizer is to train come first; without an optimizer, those that no loop makes anew.
    """
    trained = {id(tensor) for tensor in failure.step.runner.parameters} if failure.step is not None else set()
    sources = [tensor for tensor in provenance.sources_behind(root) if tensor.is_floating_point()]
    sources.sort(key=lambda tensor: id(tensor) not in trained)
    found = []
    for tensor in sources:
        if trained and id(tensor) not in trained:
            break
        holders = [
            holder
            for frame in reversed(failure.evidence.frames)
            if frame.is_user
            for holder in named(tensor, frame.live, spot_of_traced(frame), is_local=False)
        ]
        carrier = carrier_of(failure, provenance, Import(tensor, tuple(holders)), resets=True)
        if carrier is not None and not carrier[1].in_loop:
            name, made = carrier
            found.append((name, tensor, made.location("cause", f"`{name}` is made here")))
    return min(found, key=lambda item: item[2].line, default=None)
