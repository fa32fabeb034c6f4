"""Whether anything in the source reads what a holder has. What nobody reads is kept for nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.leaks.keys import key_of
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Traffic
from torchmedic.observe.heap.walk import Held
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import CALLABLES, callee

_SAMPLING = frozenset({"sample", "choice", "choices"})


def is_only_sampled(held: Held, traffic: Traffic, files: list[str]) -> bool:
    """Whether all that is ever used of it are some items by chance, as of a replay buffer."""
    return is_read(held, traffic, files) and not is_read(held, traffic, files, but_for_samples=True)


def is_read(held: Held, traffic: Traffic, files: list[str], *, but_for_samples: bool = False) -> bool:
    """Whether a line uses it for more than to put something in, or to ask how long it is."""
    name = HolderName(held)
    passing = _SAMPLING | {"len"} if but_for_samples else {"len"}
    filling = {id(owner) for site in traffic.puts for owner in _owners(site.node)}
    keys = {(site.function, ast.dump(key)) for site in traffic.puts if (key := key_of(site)) is not None}
    for file in dict.fromkeys([held.file, *files]):
        tree = syntax_tree(file) if file else None
        for node, path in _expressions(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and callee(node) in passing:
                filling |= {id(each) for each in node.args}
            elif isinstance(node, ast.Subscript) and (_function(path), ast.dump(node.slice)) in keys:
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


def _function(path: tuple[ast.AST, ...]) -> ast.AST | None:
    return next((node for node in reversed(path) if isinstance(node, CALLABLES)), None)


def _owners(node: ast.AST) -> Iterator[ast.AST]:
    """The part of a statement that names what it fills."""
    owner: ast.AST | None = None
    match node:
        case ast.Call(func=ast.Attribute(value=value)):
            owner = value
        case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target):
            owner = target
    while owner is not None:
        yield owner
        owner = getattr(owner, "value", None) or getattr(owner, "func", None)


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node of a file, outer ones first, with the functions and classes around it."""
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        yield node, path
        inner = (*path, node) if isinstance(node, CALLABLES | ast.ClassDef) else path
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
