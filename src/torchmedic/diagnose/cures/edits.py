"""Other source for a line that is to blame, or a line to add: the candidate cures that trials are made of."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator

from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.assignments import names_written
from torchmedic.source.live_frames import statement_around
from torchmedic.source.spots import Place, spot_of_node
from torchmedic.source.syntax import FUNCTIONS, LOOPS, callee, calls_in, has_line, innermost, nodes_in, syntax_tree
from torchmedic.source.user_code import relative, source_line

Candidate = tuple[str, Edit]  # the title of a treatment, and what it changes
Change = tuple[ast.expr, str]  # a part of a statement, and other text for it

_COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.For,
    ast.While,
    ast.With,
    ast.If,
    ast.Try,
    ast.Match,
)
_NOT_WRITING = frozenset("requires_grad_ detach_ share_memory_ retain_grad_ zero_grad_ apply_ map_".split())
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
_MODULES = frozenset({"torch", "F", "functional", "nn"})
_IN_PLACE, _COPY = "make it out of place", "write to a copy"


def statement_at(spot: Spot) -> ast.stmt | None:
    """The innermost statement that a spot lies in."""
    tree = syntax_tree(spot.file)
    return statement_around(tree, spot.line, spot.column) if tree is not None else None


def whole(spot: Spot, node: ast.expr | ast.stmt) -> Spot:
    """The spot of all of a statement, or of another expression in it."""
    return spot_of_node(spot.file, node, spot.function)


def rewritten(file: str, node: ast.expr | ast.stmt, changes: Iterable[Change] = ()) -> str:
    """The source of a node on one line, as its author wrote it but for the changed parts."""
    lines = [line.encode() for line in linecache.getlines(file)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def span(part: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = part.end_lineno or part.lineno, part.end_col_offset or 0
        return starts[part.lineno - 1] + part.col_offset, starts[end_line - 1] + end_column

    data = b"".join(lines)
    begin, end = span(node)
    for part, text in sorted(changes, key=lambda change: span(change[0]), reverse=True):
        first, last = span(part)
        data = data[:first] + text.encode() + data[last:]
        end += len(text.encode()) - (last - first)
    text = data[begin:end].decode(errors="replace")
    if "\n" not in text:
        return text
    return ast.unparse(ast.parse(text)) if "#" in text or '"""' in text else re.sub(r"\s*\n\s*", " ", text)


def called(text: str, node: ast.expr) -> str:
    """An expression as what a method can be called on."""
    closed = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
    return text if closed else f"({text})"


def out_of_place(spot: Spot) -> Iterator[Candidate]:
    """Ways to write what an in-place statement writes without touching the old tensor."""
    node = statement_at(spot)
    if node is None or isinstance(node, _COMPOUND):
        return
    for title, edit in _out_of_place(spot, node):
        name = edit.text.partition(" = ")[0]
        if not name.isidentifier() or _is_read_again(spot.file, node, name):
            yield title, edit


def _is_read_again(file: str, node: ast.stmt, name: str) -> bool:
    """Whether a variable is read after a statement. A new tensor in a variable that nobody reads would be lost."""
    tree = syntax_tree(file)
    around = innermost(tree, node.lineno, FUNCTIONS) or tree
    loop = innermost(around, node.lineno, LOOPS)
    is_counter = isinstance(loop, ast.For) and name in names_written(loop.target)
    if around is tree and not is_counter:
        return True  # a variable of the module, which other code may read
    for part in nodes_in(around):
        if isinstance(part, ast.Global | ast.Nonlocal) and name in part.names:
            return True
        if isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load):
            again = loop is not None and not is_counter and has_line(loop, part.lineno)
            if not has_line(node, part.lineno) and (again or part.lineno > node.lineno):
                return True
            if again and not isinstance(node, ast.Expr):
                return True  # `x += 1` in a loop reads what the turn before has left
    return False


def _out_of_place(spot: Spot, node: ast.stmt) -> Iterator[Candidate]:
    place = whole(spot, node)
    text = rewritten(spot.file, node)
    match node:
        case ast.AugAssign(target=ast.Name() | ast.Attribute() as target, op=op, value=value) if type(op) in _OPERATORS:
            name = rewritten(spot.file, target)
            right = rewritten(spot.file, value)
            right = f"({right})" if isinstance(value, ast.BinOp | ast.IfExp | ast.Compare | ast.BoolOp) else right
            yield _IN_PLACE, Edit(place, f"{name} = {name} {_OPERATORS[type(op)]} {right}")
        case ast.AugAssign(target=ast.Subscript() as target) | ast.Assign(targets=[ast.Subscript() as target]):
            base = _root(target)
            if base is not None:
                yield _COPY, Edit(place, f"{base} = {base}.clone(); {text}")
            reads = [part for part in _outermost(node.value) if base is not None and _root(part) == base]
            if reads:
                changes = [(part, f"{rewritten(spot.file, part)}.clone()") for part in reads]
                yield "compute from a copy", Edit(place, rewritten(spot.file, node, changes))
    yield from _plain_calls(spot.file, node, place, text)


def left_out(spot: Spot) -> Edit | None:
    """The statement at a spot not done at all: what the step is like if it is done later."""
    node = statement_at(spot)
    return Edit(whole(spot, node), "pass") if node is not None and not isinstance(node, _COMPOUND) else None


def copied(spot: Spot, node: ast.expr) -> Edit:
    """A copy of what an expression gives."""
    return Edit(spot_of_node(spot.file, node, spot.function), f"{called(rewritten(spot.file, node), node)}.clone()")


def _plain_calls(file: str, node: ast.stmt, place: Spot, text: str) -> Iterator[Candidate]:
    """`x.relu_()` becomes `x.relu()`, `inplace=True` becomes False, `out=x` becomes an assignment."""
    changes: list[Change] = []
    owner: ast.expr | None = None
    for call in calls_in(node):
        written = written_by(call)
        if written is None:
            continue
        owner = written
        outer = isinstance(node, ast.Expr) and call is node.value
        changes.append((call, _plain_call(file, call, written)))
        if outer and _is_name(written):
            name = rewritten(file, written)
            yield _IN_PLACE, Edit(place, f"{name} = {_plain_call(file, call, written)}")
    if owner is None:
        return
    if isinstance(node, ast.Expr) and not _is_name(owner):
        base = _root(owner)
        if base is not None:
            yield _COPY, Edit(place, f"{base} = {base}.clone(); {text}")
            values = node.value.args if isinstance(node.value, ast.Call) else []
            reads = [part for value in values for part in _outermost(value) if _root(part) == base]
            if reads:
                copies = [(part, f"{rewritten(file, part)}.clone()") for part in reads]
                yield "compute from a copy", Edit(place, rewritten(file, node, copies))
    elif not (isinstance(node, ast.Expr) and len(changes) == 1 and changes[0][0] is node.value):
        innermost = [change for change in changes if not any(_holds(change[0], other[0]) for other in changes)]
        plain = rewritten(file, node, innermost)
        name = rewritten(file, owner) if isinstance(node, ast.Expr) else ""
        yield _IN_PLACE, Edit(place, f"{name} = {plain}" if name else plain)


def written_by(call: ast.Call) -> ast.expr | None:
    """The tensor that a call writes to, going by its name and its keywords."""
    function, name = call.func, callee(call)
    words = {word.arg: word.value for word in call.keywords}
    if "out" in words:
        return words["out"]
    flagged = isinstance(words.get("inplace"), ast.Constant) and words["inplace"].value is True  # type: ignore[attr-defined]
    named = name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITING
    if not flagged and not named:
        return None
    if isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[0] not in _MODULES:
        return None if flagged else function.value
    if isinstance(function, ast.Attribute) and ast.unparse(function.value).endswith("init"):
        return None
    return call.args[0] if call.args else words.get("input")


def _plain_call(file: str, call: ast.Call, written: ast.expr) -> str:
    """The source of an in-place call without its write."""
    function, name = call.func, ""
    if isinstance(function, ast.Attribute):
        name = function.attr
    owner = rewritten(file, written)
    first = rewritten(file, call.args[0]) if call.args else ""
    if name in ("zero_", "fill_", "copy_") and function.value is written:  # type: ignore[attr-defined]
        return {
            "zero_": f"torch.zeros_like({owner})",
            "fill_": f"torch.full_like({owner}, {first})",
            "copy_": f"torch.empty_like({owner}).copy_({first})",
        }[name]
    words = [word for word in call.keywords if word.arg != "out"]
    arguments = [rewritten(file, part) for part in call.args]
    for word in words:
        text = "False" if word.arg == "inplace" else rewritten(file, word.value)
        arguments.append(f"{word.arg}={text}" if word.arg else f"**{text}")
    return f"{rewritten(file, function).removesuffix('_')}({', '.join(arguments)})"


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def _holds(outer: ast.expr, inner: ast.expr) -> bool:
    return outer is not inner and any(part is inner for part in ast.walk(outer))


def _root(node: ast.expr) -> str | None:
    """What `h.t()[0]` is a part of: `h`."""
    while True:
        match node:
            case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner)):
                node = inner
            case ast.Name(id=name):
                return name
            case ast.Attribute(attr="T" | "mT" | "data", value=inner):
                node = inner
            case ast.Attribute():
                return ast.unparse(node)
            case _:
                return None


def _outermost(node: ast.expr) -> Iterator[ast.expr]:
    """The names, attributes and subscripts of an expression, of nested ones only the outermost."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield node
        return
    function = node.func if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield from _outermost(child.value)
        elif child is function:
            if isinstance(child, ast.Attribute):
                yield from _outermost(child.value)
        elif isinstance(child, ast.expr):
            yield from _outermost(child)


def line_added_after(where: Place, line: str) -> str:
    """A patch that puts a line behind another one, indented like it. Empty where that is no whole statement."""
    text = source_line(where.file, where.line)
    if not _is_whole(text):
        return ""
    return _patch(where.file, where.line, where.line + 1, _indented(text, line))


def line_added_before(where: Place, line: str) -> str:
    """A patch that puts a line before another one, indented like it."""
    text = source_line(where.file, where.line)
    if not _is_whole(text):
        return ""
    return _patch(where.file, where.line - 1, where.line, _indented(text, line))


def _is_whole(text: str) -> bool:
    """Whether a statement begins and ends on this line, as far as its brackets tell."""
    code = text.split("#", maxsplit=1)[0].strip()
    return bool(code) and not code.endswith((":", ",", "\\", "(")) and code.count("(") == code.count(")")


def _indented(like: str, line: str) -> str:
    return like[: len(like) - len(like.lstrip())] + line


def _patch(file: str, old: int, new: int, line: str) -> str:
    name = relative(file)
    return f"--- {name}\n+++ {name}\n@@ -{old},0 +{new} @@\n+{line}\n"
