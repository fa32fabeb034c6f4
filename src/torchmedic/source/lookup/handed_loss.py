"""The function of the user's that hands the loss to a library, which calls backward itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

import torch

from torchmedic.source.live_frames import Frame
from torchmedic.source.returns import code_of
from torchmedic.source.syntax import CALLABLES, FUNCTIONS, function_of, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

HANDING = "training_step"  # of a LightningModule
_METHODS = (HANDING, "compute_loss", "forward")  # `compute_loss` of a Trainer; `forward` of the model where it has none


class Handing(NamedTuple):
    """A function and its `return` statements that give something, the last one last."""

    file: str
    function: ast.FunctionDef | ast.AsyncFunctionDef
    returns: list[ast.Return]


def handing_function(frames: list[Frame]) -> Handing | None:
    """The function whose result the library in these frames takes for the loss; None where a library wrote it."""
    owners = [value for frame in frames if not frame.is_user for value in frame.variables.values()]
    owners += [each.module for each in owners if isinstance(each, torch.nn.parallel.DistributedDataParallel)]
    for method in _METHODS:
        for owner in owners:
            if method == "forward" and not isinstance(owner, torch.nn.Module):
                continue
            function = getattr(type(owner), method, None)
            code = code_of(function) if callable(function) else None
            if code is not None and is_user_file(code.co_filename):
                return _described(code)
    return None


def silent_steps() -> list[Handing]:
    """The training steps in the user's files that return nothing."""
    found = [
        Handing(file, node, list(_returns(node)))
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, FUNCTIONS) and node.name == HANDING
    ]
    return [each for each in found if not each.returns]


def _described(code: CodeType) -> Handing | None:
    node = function_of(syntax_tree(code.co_filename), code)
    return Handing(code.co_filename, node, list(_returns(node))) if isinstance(node, FUNCTIONS) else None


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """The `return` statements of a function that give something, not those of functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node
        if not isinstance(node, CALLABLES | ast.ClassDef):
            yield from _returns(node)
