"""Which statements make up the failing step: cut from the source of a live frame, ready to be run once more.

The cut goes from the start of the innermost block that holds both the forward pass and the failing line (a loop body or
a function body) to the failing statement. What only keeps books (appending to lists, printing, saving, stepping the
optimizer) is left out unless the step depends on it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchmedic.replay.frames import syntax_tree
from torchmedic.replay.standalone import Standalone

Block = list[ast.stmt]

_LINE_END = 1 << 30
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BOOKKEEPING = frozenset(
    "append extend add insert put write log info debug warning warn print add_scalar add_scalars add_histogram "
    "set_postfix set_description update_postfix record save dump flush update log_metrics appendleft".split()
)


class CannotCut(Exception):
    """No segment can be cut; the text says why."""


class Segment:
    """The statements of a step, compiled for the frame that they were cut from."""

    def __init__(self, file: str, statements: Block, function: str, first: int, last: int) -> None:
        self.file = file
        self.statements = statements
        self.function = function
        self.lines = (first, last)

    def code(self) -> list[tuple[ast.stmt, Any]]:
        """One code object per statement, in order."""
        compiled = []
        for statement in self.statements:
            module = ast.Module(body=[statement], type_ignores=[])
            compiled.append((statement, compile(ast.fix_missing_locations(module), self.file, "exec")))
        return compiled


def cut(
    frame: FrameType,
    line: int,
    forward_line: int | None,
    *,
    column: int | None = None,
    include_failing: bool = True,
    through_backward: bool = False,
    outwards: int = 0,
    tree: ast.Module | None = None,
) -> Segment:
    """Cut the step out of a frame.

    Args:
        frame: The replay frame.
        line: Its line that failed, or that was being executed.
        forward_line: Its line at the forward pass, where that is known.
        column: Where on that line, in bytes from 0, should several statements share it.
        include_failing: Whether the failing statement belongs to the step (`backward()` does, `optimizer.step()` not).
        through_backward: Whether to go on to the statement that calls backward, where the step did not get there.
        outwards: How many loops to go out of, where what matters happened in earlier turns of the inner ones.
        tree: Other syntax for the same file, for a trial.

    Raises:
        CannotCut: The source is missing or does not hold these lines.
    """
    file = frame.f_code.co_filename
    tree = tree if tree is not None else syntax_tree(file, frame.f_globals)
    if tree is None:
        raise CannotCut(f"the source of {file} is missing")
    body = _body_of(tree, frame)
    if body is None:
        raise CannotCut(f"`{frame.f_code.co_name}` is not in the source of {file}")
    lines = {line} if forward_line is None else {line, forward_line}
    block = _innermost_block(body, lines)
    inner = _innermost_block(body, {line})
    if inner is not block and forward_line is not None and not _feeds(block, forward_line, line):
        block = inner  # the first forward pass after the last update was another one, an evaluation say
    for _ in range(outwards):
        block = _block_around(body, block, line)
        if block is body and frame.f_code.co_name == "<module>":
            raise CannotCut("the whole script would have to run again")
    statements = _truncate(block, (line, _LINE_END if column is None else column), include_failing)
    if through_backward:
        statements = _go_on(statements, block, line)
    if not statements:
        raise CannotCut("no statement stands before the failing one")
    needed = _needed(statements, _tensor_names(frame))
    prepared: Block = []
    for statement in needed:
        result = Standalone(frame).visit(copy.deepcopy(statement))
        prepared.extend(result if isinstance(result, list) else [result])
    return Segment(file, prepared, frame.f_code.co_name, block[0].lineno, line)


def carried_names(frame: FrameType, line: int) -> frozenset[str]:
    """Names that a loop body reads before it assigns them: their value comes from the iteration before."""
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    body = _body_of(tree, frame) if tree is not None else None
    if body is None:
        return frozenset()
    block = _innermost_block(body, {line}, header_counts=True)
    assigned = {name for statement in block for name in names_written(statement)}
    return frozenset((read_first(block) & assigned) - _loop_names(body, block))


def read_first(block: Block) -> set[str]:
    """Names that statements read before they assign them."""
    return _read_first(block, set())


def _read_first(block: Block, written: set[str]) -> set[str]:
    """`written` holds what has been assigned so far, and is added to where that is certain."""
    found: set[str] = set()
    for statement in block:
        inner = list(_blocks(statement)) if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else []
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


def _feeds(block: Block, forward_line: int, line: int) -> bool:
    """Whether what a forward pass leaves behind is read by the inner loop that holds a line."""
    results: set[str] = set()
    for statement in block:
        if _spans(statement, {line}):
            return forward_line < line and not results.isdisjoint(names_read(statement))
        if _spans(statement, {forward_line}) or not results.isdisjoint(names_read(statement)):
            results.update(names_written(statement))
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                    results.update(names_read(node.value))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    # `losses.append(model(x))`
                    function = node.value.func
                    if isinstance(function, ast.Attribute) and function.attr in _BOOKKEEPING:
                        results.update(names_read(function.value))
    return True


def _loop_names(body: Block, block: Block) -> set[str]:
    """The names that the header of a loop gives new values to: they do not come from the iteration before."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.For | ast.AsyncFor) and node.body is block:
                return {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return set()


def _body_of(tree: ast.Module, frame: FrameType) -> Block | None:
    if frame.f_code.co_name == "<module>":
        return tree.body
    first = frame.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == frame.f_code.co_name:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if start == first:
                return node.body
    return None


def _innermost_block(body: Block, lines: set[int], *, header_counts: bool = False) -> Block:
    """The body of the innermost loop that holds all lines, else the whole body.

    A loop that fetches its next item is at its header; `header_counts` takes that for its body.
    """
    best = body
    candidates = list(body)
    while candidates:
        found: ast.stmt | None = None
        for statement in candidates:
            if _spans(statement, lines):
                found = statement
                break
        if found is None or isinstance(found, (*_FUNCTIONS, ast.ClassDef)):
            return best
        candidates = []
        for block in _blocks(found):
            if isinstance(found, _LOOPS) and block is found.body:
                at_header = header_counts and all(found.lineno <= line < block[0].lineno for line in lines)
                if at_header or _spans_block(block, lines):
                    best = block
            candidates.extend(block)
    return best


def _block_around(body: Block, block: Block, line: int) -> Block:
    """The block that holds the loop whose body a block is."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, _LOOPS) and node.body is block:
                return _innermost_block(body, {line, node.lineno})
    raise CannotCut("there is no loop around it")


def _blocks(statement: ast.stmt) -> Iterator[Block]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def _spans(statement: ast.stmt, lines: set[int]) -> bool:
    return all(statement.lineno <= line <= (statement.end_lineno or statement.lineno) for line in lines)


def _spans_block(block: Block, lines: set[int]) -> bool:
    return all(block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno) for line in lines)


def _truncate(block: Block, point: tuple[int, int], include_failing: bool) -> Block:
    """The statements up to the failing point; the branch that was taken in place of the `if` or `try` around it."""
    kept: Block = []
    for statement in block:
        if (statement.lineno, statement.col_offset) > point:
            break
        end = (statement.end_lineno or statement.lineno, statement.end_col_offset or 0)
        if end <= point and not (point[1] == _LINE_END and end[0] == point[0]):
            kept.append(statement)
            continue
        inner = next((part for part in _blocks(statement) if _spans_block(part, {point[0]})), None)
        if inner is None:
            if include_failing:
                kept.append(statement)
                if point[1] == _LINE_END:
                    continue  # where on the line is not known: all of it
        elif isinstance(statement, ast.With | ast.AsyncWith):
            body = _truncate(inner, point, include_failing)
            if body:
                shortened = copy.copy(statement)
                shortened.body = body
                kept.append(shortened)
        elif isinstance(statement, (*_LOOPS, *_FUNCTIONS, ast.ClassDef)):
            kept.append(statement)  # the forward pass is outside, so all of the loop belongs to the step
        else:
            if isinstance(statement, ast.If) and any(
                isinstance(part, ast.NamedExpr) for part in ast.walk(statement.test)
            ):
                kept.append(ast.copy_location(ast.Expr(statement.test), statement))  # the test binds a name
            kept.extend(_truncate(inner, point, include_failing))
        break
    return kept


def _go_on(statements: Block, block: Block, line: int) -> Block:
    """Statements up to a failing one, and those behind it as far as backward."""
    if any(_calls_backward(statement) for statement in statements):
        return statements
    at = next((number for number, statement in enumerate(block) if _spans(statement, {line})), len(block))
    for number in range(at, len(block)):
        if _calls_backward(block[number]):
            return block[: number + 1]
    raise CannotCut("backward is not called from this frame")


def _calls_backward(statement: ast.stmt) -> bool:
    """Whether a statement itself goes backward: `loss.backward()`, `torch.autograd.grad(...)`."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return False
    called = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr in ("backward", "grad") for function in called)


def _tensor_names(frame: FrameType) -> set[str]:
    # Asked of the type: some views raise at the mere look at their `grad_fn`.
    return {name for name, value in frame.f_locals.items() if hasattr(type(value), "grad_fn")}


def _needed(statements: Block, tensors: set[str]) -> Block:
    """Leave out what only keeps books: an expression statement whose call is known to do no more than that."""
    last = len(statements) - 1
    return [
        statement
        for position, statement in enumerate(statements)
        if position == last or not _is_bookkeeping(statement, statements[position + 1 :], tensors)
    ]


def _is_bookkeeping(statement: ast.stmt, rest: Block, tensors: set[str]) -> bool:
    if isinstance(statement, ast.Assert | ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return not isinstance(statement, ast.Import | ast.ImportFrom)
    if isinstance(statement, ast.AugAssign):
        # `total += loss.item()` keeps books; `loss += aux` does not, nor does what writes to a tensor's memory.
        name = statement.target.id if isinstance(statement.target, ast.Name) else None
        return name is not None and name not in tensors and not any(name in names_read(later) for later in rest)
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    function = statement.value.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in _BOOKKEEPING


def names_written(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id


def names_read(statement: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        names.add(statement.target.id)
    return names
