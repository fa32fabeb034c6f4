"""Which names statements read and which they assign, and the parts of both sides of an assignment or a comparison."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchmedic.source.syntax import CALLABLES, Block, blocks, nodes_in

_MAKERS = frozenset("list dict set deque OrderedDict Counter".split())


def sides(comparison: ast.Compare) -> list[ast.expr]:
    return [comparison.left, *comparison.comparators]


def terms(value: ast.expr) -> Iterator[ast.expr]:
    """The terms that are added and subtracted to make a number."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
        yield from terms(value.left)
        yield from terms(value.right)
    else:
        yield value


def is_blank(value: ast.expr) -> bool:
    """Whether it is a new container with nothing in it, or with nothing but such."""
    match value:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(values=parts):
            return all(is_blank(each) for each in parts)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[]) if name in _MAKERS:
            return True
        case ast.Call(func=ast.Name(id="defaultdict") | ast.Attribute(attr="defaultdict")):
            return True
        case ast.Call(func=ast.Call(func=ast.Name(id="type")) | ast.Attribute(attr="__class__"), args=[], keywords=[]):
            return True  # `type(losses)()`
    return isinstance(value, ast.Constant)


def blanks(node: ast.AST) -> Iterator[tuple[str | None, ast.expr]]:
    """The new containers that a call of `update` hands out, each with its key where that stands there."""
    match node:
        case ast.Call(func=ast.Attribute(attr="update"), args=args, keywords=keywords):
            given = [(each.arg, each.value) for each in keywords]
            for each in args:
                if isinstance(each, ast.Dict):
                    given += [
                        (str(key.value) if isinstance(key, ast.Constant) else None, value)
                        for key, value in zip(each.keys, each.values, strict=True)
                    ]
                elif isinstance(each, ast.DictComp):
                    given.append((None, each.value))
            yield from ((key, value) for key, value in given if is_new(value))


def is_new(value: ast.expr) -> bool:
    return is_blank(value) and not isinstance(value, ast.Constant)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with what it is given: `a, b = b, a` is two assignments."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        match target, node.value:
            case (ast.Tuple() | ast.List(), ast.Tuple() | ast.List()) if len(target.elts) == len(node.value.elts):
                yield from zip(target.elts, node.value.elts, strict=True)
            case _:
                yield from ((each, node.value) for each in flat([target]))


def targets_of(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def items_written(tree: ast.AST | None) -> Iterator[tuple[ast.Assign | ast.AugAssign, ast.Subscript]]:
    """The assignments to an item, each with its target: `group["lr"] = rate`."""
    for node in nodes_in(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            yield from ((node, target) for target in targets_of(node) if isinstance(target, ast.Subscript))


def flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """The single targets of an assignment: `a`, `b` and `c` of `(a, b), *c = ...`."""
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        elif isinstance(target, ast.Starred):
            yield from flat([target.value])
        else:
            yield target


def read_first(block: Block) -> set[str]:
    """Names that statements read before they assign them."""
    return _read_first(block, set())


def _read_first(block: Block, written: set[str]) -> set[str]:
    """`written` holds what has been assigned so far, and is added to where that is certain."""
    found: set[str] = set()
    for statement in block:
        inner = list(blocks(statement)) if not isinstance(statement, CALLABLES | ast.ClassDef) else []
        if not inner:
            found |= names_read(statement) - written
            written |= set(names_written(statement))
            continue
        header = _header(statement)
        found |= {name for part in header for name in names_read(part)} - written
        bound = {name for part in header for name in names_written(part)}
        after = [written | bound for _ in inner]
        for part, known in zip(inner, after, strict=True):
            found |= _read_first(part, known)
        # Only one block of an `if` is run, and that of a loop perhaps never; but all of a `with`.
        certain = isinstance(statement, ast.With | ast.AsyncWith) or (isinstance(statement, ast.If) and len(inner) > 1)
        written |= set.intersection(*after) if certain else bound
    return found


def _header(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a compound statement that are not blocks."""
    return [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt | ast.ExceptHandler)]


def names_written(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id


def names_read(statement: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        names.add(statement.target.id)
    return names
