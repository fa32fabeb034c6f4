"""The statement that puts things into a container, or adds to a variable: found by its name in the user's source.

A list of a library (`metric.update(preds, labels)`) has no name in the user's source: there, the line that gives
something to the library's object is the only one that leads to it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Traffic, nodes_of
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.observe.heap.walk import Held
from torchmedic.records import Location, Role
from torchmedic.source.assignments import flat
from torchmedic.source.live_frames import node_location
from torchmedic.source.objects.parts import is_users
from torchmedic.source.syntax import (
    ADDING_METHODS,
    CALLABLES,
    LOOPS,
    STORING_METHODS,
    cuts_graph,
    function_around,
    has_line,
    nodes_in,
    syntax_tree,
)
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import loaded_files

# An object of a library may keep what any of these methods is given; of the user's own classes the source is read.
_GIVES = ADDING_METHODS | STORING_METHODS | {"add_batch", "observe", "forward"}


class Filler(NamedTuple):
    """A statement that stores, and what it stores."""

    file: str
    node: ast.stmt | ast.expr
    value: ast.expr | None
    in_loop: bool

    def location(self, role: Role, label: str) -> Location:
        return node_location(role, self.file, self.node, label)

    @property
    def text(self) -> str:
        """The text of the expression that is stored."""
        return ast.unparse(self.value) if self.value is not None else ""

    @property
    def frees_graph(self) -> bool:
        """Whether what is stored is made a number or is cut off from its graph first."""
        return isinstance(self.value, ast.Call) and cuts_graph(self.value)


def fillers_of(holder: Holder) -> list[Filler]:
    """The statements that may have put something there, the likeliest first."""
    puts = traffic_of(holder).puts
    cached = holder.via == "cache"  # filled by a decorator, which stands outside of the function
    found = [
        Filler(site.file, site.node, site.value, bool(cached or site.loops or site.function is not None))
        for site in puts
    ] or [Filler(file, call, None, True) for file, call in given_at(holder, _sources(holder))]
    return sorted(found, key=lambda filler: (filler.frees_graph, not filler.in_loop))


def traffic_of(holder: Holder) -> Traffic:
    """The lines that fill and empty a holder, and whether it is filled only up to a length."""
    return traffic(_held(holder), [file for file, _ in _sources(holder)])


def _held(holder: Holder) -> Held:
    """The record that the watch over leaks would have of this holder."""
    path = re.sub(r"\[.*?\]", "", holder.path)
    by_attribute = bool(holder.attribute) and holder.parent is not None
    last = holder.attribute if by_attribute else path.partition(".")[0]
    return Held(holder.path, last, "items", 0, holder.file, 0 if by_attribute else holder.local, via=holder.via)


def _sources(holder: Holder) -> Iterator[tuple[str, ast.Module]]:
    files = [holder.file]
    parent = holder.parent
    if parent is not None:
        kind = parent if isinstance(parent, type) else type(parent)
        for base in kind.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if isinstance(file, str):
                files.append(file)
    if not holder.function or parent is not None:
        files += loaded_files()
    for file in dict.fromkeys(files):
        if is_user_file(file) and (tree := syntax_tree(file)) is not None:
            yield file, tree


def assigned_at(holder: Holder) -> list[Filler]:
    """The statements that give a variable or an attribute its value."""
    name, is_global = HolderName(_held(holder)), not holder.function and holder.parent is None
    found: list[Filler] = []
    for file, _ in _sources(holder):
        for node, path in nodes_of(file):
            match node:
                case ast.Assign(targets=targets):
                    where: Any = node
                case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                    targets, where = [target], node
                case ast.For(target=target, iter=where):
                    targets = [target]
                case _:
                    continue
            here = name.at(path) if name.may_stand(file, path) else None
            if here is None or not any(here.matches(each) for each in flat(targets)):
                continue
            function = function_around(path)
            if not is_global or function is None or _is_global_in(function, holder):
                in_loop = any(isinstance(each, LOOPS | CALLABLES) for each in path)
                found.append(Filler(file, where, getattr(node, "value", None), in_loop))
    return sorted(found, key=lambda filler: (not filler.in_loop, not is_looped(filler)))


def _is_global_in(function: ast.AST, holder: Holder) -> bool:
    """Whether the name of a variable of the module means that variable where a function assigns it."""
    name = re.split(r"[.\[]", holder.path, maxsplit=1)[0]
    return any(isinstance(each, ast.Global) and name in each.names for each in ast.walk(function))


def is_looped(filler: Filler) -> bool:
    """Whether a loop stands around a statement, and not just the function that it is in."""
    tree = syntax_tree(filler.file)
    line = filler.node.lineno
    return any(isinstance(node, LOOPS) and any(has_line(each, line) for each in node.body) for node in nodes_in(tree))


def given_at(holder: Holder, trees: Iterable[tuple[str, ast.Module]]) -> Iterator[tuple[str, ast.Call]]:
    """The calls that may have put something there, with their files."""
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
