"""Whether anything in the source reads what a holder has. What no line reads is kept for nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.leaks.keys import key_of
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Traffic
from torchmedic.observe.heap.walk import Held
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import CALLABLES, Path, callee, function_around


def is_read(held: Held, traffic: Traffic, files: list[str]) -> bool:
    """Whether a line uses a holder for more than to put something in, or to ask how long it is."""
    name = HolderName(held)
    filling = {id(owner) for site in traffic.puts for owner in _owners(site.node)}
    keys = {(site.function, ast.dump(key)) for site in traffic.puts if (key := key_of(site)) is not None}
    for file in dict.fromkeys([held.file, *files]):
        tree = syntax_tree(file) if file else None
        for node, path in _nodes_with_paths(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and callee(node) == "len":
                filling |= {id(each) for each in node.args}
            elif isinstance(node, ast.Subscript) and (function_around(path), ast.dump(node.slice)) in keys:
                filling.add(id(node.value))  # what was put in at this moment
            elif (
                isinstance(node, ast.Name | ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in filling
                and name.may_stand(file, path)
                and name.at(path).is_meant_by(node)
            ):
                return True
    return False


def _owners(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement that name the holder which it fills."""
    owner: ast.AST | None = None
    match node:
        case ast.Call(func=ast.Attribute(value=value)):
            owner = value
        case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target):
            owner = target
    while owner is not None:
        yield owner
        owner = getattr(owner, "value", None) or getattr(owner, "func", None)


def _nodes_with_paths(tree: ast.AST) -> Iterator[tuple[ast.AST, Path]]:
    """Every node of a file, outer ones first, with the functions and classes around it."""
    pending: list[tuple[ast.AST, Path]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        yield node, path
        inner = (*path, node) if isinstance(node, CALLABLES | ast.ClassDef) else path
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
