"""Other source for a line that is to blame: the candidate cures that trials are made of."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from torchmedic.replay.microscope import Spot
from torchmedic.replay.trial import Edit

_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.Mod: "%",
    ast.FloorDiv: "//",
}


def statement_at(spot: Spot) -> ast.stmt | None:
    """The innermost statement that a spot lies in."""
    try:
        tree = ast.parse("".join(linecache.getlines(spot.file)))
    except SyntaxError:
        return None
    best: ast.stmt | None = None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.stmt)
            and node.lineno <= spot.line <= (node.end_lineno or node.lineno)
            and (best is None or node.lineno >= best.lineno)
        ):
            best = node
    return best


def whole(spot: Spot, node: ast.stmt) -> Spot:
    """The spot of a whole statement."""
    return Spot(spot.file, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, spot.function)


def out_of_place(spot: Spot) -> Iterator[tuple[str, Edit]]:
    """Ways to write what an in-place statement writes without touching the old tensor."""
    node = statement_at(spot)
    if node is None:
        return
    place = whole(spot, node)
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        target, value = ast.unparse(node.target), ast.unparse(node.value)
        if isinstance(node.target, ast.Subscript):
            base = ast.unparse(node.target.value)
            yield (
                "write to a copy",
                Edit(place, f"{base} = {base}.clone(); {target} {_OPERATORS[type(node.op)]}= {value}"),
            )
        else:
            yield (
                "make it out of place",
                Edit(place, f"{target} = {target} {_OPERATORS[type(node.op)]} {_bracketed(node.value)}"),
            )
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        base = ast.unparse(node.targets[0].value)
        yield "write to a copy", Edit(place, f"{base} = {base}.clone(); {ast.unparse(node)}")
    changed = _Plain()
    copy = changed.visit(ast.parse(ast.unparse(node)).body[0])
    if changed.found and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.With | ast.If):
        text = ast.unparse(ast.fix_missing_locations(copy))
        if isinstance(node, ast.Expr) and changed.owner is not None:
            text = f"{changed.owner} = {text}"  # the result was thrown away: the tensor itself was the result
        yield "make it out of place", Edit(place, text)


def detached_use(file: str, name: str, lines: tuple[int, int]) -> Iterator[tuple[str, Edit]]:
    """Use a carried variable without its history, at the first line of the step that reads it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and ast.unparse(node) == name
        and lines[0] <= node.lineno <= lines[1]
    ]
    if not uses:
        return
    first = min(uses, key=lambda node: (node.lineno, node.col_offset))
    spot = Spot(file, first.lineno, first.col_offset, first.end_lineno, first.end_col_offset, "")
    title = f"detach `{name}` where the next step takes it over"
    yield title, Edit(spot, f"{name}.detach()")
    yield title, Edit(spot, f"tuple(part.detach() for part in {name})")


def retained(spot: Spot) -> Iterator[tuple[str, Edit]]:
    """Keep the graph of a backward call for the next one."""
    node = statement_at(spot)
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return
    call = node.value
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        call.keywords = [word for word in call.keywords if word.arg != "retain_graph"]
        call.keywords.append(ast.keyword("retain_graph", ast.Constant(True)))
        yield "keep the graph of the first backward for the second", Edit(whole(spot, node), ast.unparse(node))


def _bracketed(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.BinOp | ast.IfExp | ast.Compare | ast.BoolOp | ast.Lambda) else text


class _Plain(ast.NodeTransformer):
    """`x.relu_()` becomes `x.relu()`; `inplace=True` becomes False."""

    def __init__(self) -> None:
        self.found = False
        self.owner: str | None = None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__"):
            self.found = True
            self.owner = ast.unparse(function.value)
            if function.attr == "copy_" and node.args:
                return ast.copy_location(ast.parse(f"{ast.unparse(node.args[0])}.clone()", mode="eval").body, node)
            function.attr = function.attr[:-1]
        for keyword in node.keywords:
            if keyword.arg == "inplace" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                self.found = True
                keyword.value = ast.Constant(False)
                if node.args and isinstance(node.args[0], ast.Name):
                    self.owner = node.args[0].id
        return node
