"""Which line of the user's chose the parameters that an optimizer has."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchmedic.source.spots import Place
from torchmedic.source.syntax import CALLABLES, FUNCTIONS, has_line, innermost, nodes_in, syntax_tree


def chosen_at(built: Place, caller: Place | None, left_out: Iterable[str] = ()) -> Place:
    """The line that chose the parameters of an optimizer: the call of a function that takes all it is given.

    Args:
        built: The line that builds the optimizer.
        caller: The line that calls the function around it.
        left_out: Names of layers that the optimizer does not have. A function that was given one did not take all.
    """
    tree = syntax_tree(built.file)
    around: list[ast.AST | None] = [innermost(tree, built.line, FUNCTIONS)]
    around += [node for node in nodes_in(tree) if isinstance(node, ast.Lambda) and has_line(node, built.line)]
    takes_all = any(isinstance(each, CALLABLES) and _takes_all(each, left_out) for each in around)
    return caller if caller is not None and takes_all else built


def _takes_all(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, left_out: Iterable[str]) -> bool:
    """Whether a function takes the parameters of what it is given, and of nothing else."""
    plain = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    given = {each.arg for each in (*plain, function.args.vararg) if each is not None and each.arg != "self"}
    if any(name.partition(".")[0] in given for name in left_out):
        return False
    owners: list[ast.expr] = []
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="parameters" | "named_parameters")):
                owners.append(owner)
            case (
                ast.For(target=ast.Name(id=name), iter=ast.Name(id=whole))
                | ast.comprehension(target=ast.Name(id=name), iter=ast.Name(id=whole))
            ) if whole in given:
                given.add(name)
    return bool(owners) and all(isinstance(each, ast.Name) and each.id in given for each in owners)
