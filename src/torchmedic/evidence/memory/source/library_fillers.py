"""Lines that give something to an object of a library, which keeps it: `metric.update(preds, labels)`.

The list that grows is the library's, and no line of the user's names it; but only this line leads to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import torch

from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.source.objects.parts import is_users
from torchmedic.source.vocabulary import ADDING_METHODS, STORING_METHODS

# An object of a library may keep what any of these methods is given; of the user's own classes the source is read.
_GIVES = ADDING_METHODS | STORING_METHODS | {"add_batch", "observe", "forward"}


def given_at(holder: Holder, trees: Iterable[tuple[str, ast.Module]]) -> Iterator[tuple[str, ast.Call]]:
    """The calls that may have put something there, with their files.

    Args:
        holder: An attribute of a module whose class is not the user's.
        trees: The files of the user's where its owner may be known.
    """
    owner = holder.parent
    if not isinstance(owner, torch.nn.Module) or is_users(type(owner)):
        return
    known = re.findall(r"[^\W\d]\w*", holder.path.removesuffix(f".{holder.attribute}"))
    name = known[-1] if known and holder.path.endswith(f".{holder.attribute}") else ""
    for file, tree in trees if name else ():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (node.args or node.keywords) and _is_given(node.func, name):
                yield file, node


def _is_given(function: ast.expr, name: str) -> bool:
    """`metric(...)`, `self.metric(...)`, `metrics["metric"](...)`, or a method of one that takes things in."""
    if isinstance(function, ast.Attribute) and function.attr in _GIVES:
        function = function.value
    match function:
        case ast.Name(id=called) | ast.Attribute(attr=called) | ast.Subscript(slice=ast.Constant(value=called)):
            return called == name
    return False
