"""Other names of a holder: a variable that it is assigned to, a parameter, a loop variable, `self` in its own class."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import functions_of, nodes_of, parameters_of
from torchmedic.observe.heap.walk import Held
from torchmedic.source.syntax import COMPREHENSIONS, Path, callee, first_line, function_around, last_name

_ITEM_GIVERS = frozenset({"list", "tuple", "reversed", "sorted", "values"})  # give the items of their argument


def aliases(name: HolderName, held: Held, files: list[str]) -> Iterator[Held]:
    """The holder once more under each of its other names."""
    plain = held._replace(own="", owners=())
    for file in files:
        for node, path in nodes_of(file):
            if not name.may_stand(file, path):
                continue
            here, function = name.at(path), function_around(path)
            others = set(_loop_variables(here, path, is_item=held.name.endswith("]")))
            match node:
                case ast.Assign(targets=[ast.Name(id=other)], value=value) if here.is_meant_by(value):
                    others.add(other)
                case ast.Call():
                    yield from _parameters(here, node, plain, [file, *files])
            local = first_line(function) if function is not None else 0
            yield from (plain._replace(name=other, last=other, file=file, local=local) for other in sorted(others))
    for file, method in _methods(held.own, files):
        yield plain._replace(name="self", last="self", file=file, local=first_line(method))


def _methods(owner: str, files: list[str]) -> Iterator[tuple[str, ast.AST]]:
    for file in files if owner else ():
        for _, path in nodes_of(file):
            if any(isinstance(each, ast.ClassDef) and each.name == owner for each in path):
                function = function_around(path)
                if function is not None:
                    yield file, function


def _parameters(name: HolderName, call: ast.Call, held: Held, files: list[str]) -> Iterator[Held]:
    """The parameters of functions of the user's that a call gives the holder to."""
    for function_name, arguments in _calls_made(call):
        given = [number for number, each in enumerate(arguments) if name.is_meant_by(each)]
        keywords = [each.arg for each in call.keywords if each.arg and name.is_meant_by(each.value)]
        for file, function in functions_of(function_name, files) if given or keywords else ():
            parameters = parameters_of(function)
            for inner in (*(parameters[number] for number in given if number < len(parameters)), *keywords):
                yield held._replace(name=inner, last=inner, file=file, local=first_line(function))


def _calls_made(call: ast.Call) -> Iterator[tuple[str, list[ast.expr]]]:
    """The function that is called with its arguments, and functions handed in to be called: `partial(log, losses)`."""
    yield callee(call), call.args
    for number, each in enumerate(call.args[:-1]):
        if name := last_name(each):
            yield name, call.args[number + 1 :]
    named = {each.arg: each.value for each in call.keywords}
    target, arguments = named.get("target"), named.get("args")  # `Thread(target=log, args=(losses,))`
    if target is not None and isinstance(arguments, ast.Tuple | ast.List):
        yield last_name(target), arguments.elts


def _loop_variables(name: HolderName, path: Path, *, is_item: bool) -> Iterator[str]:
    """The variables that stand for the holder in the loops and comprehensions around a line.

    Args:
        name: The holder's.
        path: What stands around the line.
        is_item: Whether the holder is one of several, which a loop may go over: `for values in history.values():`.
    """
    for loop in path:
        if isinstance(loop, ast.For):
            yield from _targets(name, loop.target, loop.iter, is_item=is_item)
        elif isinstance(loop, COMPREHENSIONS):
            for each in loop.generators:
                yield from _targets(name, each.target, each.iter, is_item=is_item)


def _targets(name: HolderName, target: ast.expr, source: ast.expr, *, is_item: bool) -> Iterator[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
    match source:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            is_meant = any(name.is_meant_by(each) for each in elements)  # `for each in (losses, scores):`
        case ast.Call(func=ast.Attribute(attr="items", value=whole)):
            is_meant, target = is_item and name.is_meant_by(whole), parts[-1] if parts else target
        case ast.Call(func=ast.Attribute(attr="values", value=whole)):
            is_meant = is_item and name.is_meant_by(whole)
        case ast.Call(args=[first, *_]) if callee(source) == "enumerate" and parts:
            yield from _targets(name, parts[-1], first, is_item=is_item)
            return
        case ast.Call(args=args) if callee(source) == "zip":
            for part, each in zip(parts, args, strict=False):
                yield from _targets(name, part, each, is_item=is_item)
            return
        case ast.Call(args=[first]) if callee(source) in _ITEM_GIVERS:
            yield from _targets(name, target, first, is_item=is_item)
            return
        case _:
            is_meant = is_item and name.is_meant_by(source)
    if is_meant and isinstance(target, ast.Name):
        yield target.id
