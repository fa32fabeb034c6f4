"""Which statements make up the failing step: cut from the source of a live frame, ready to be run once more.

The cut goes from the start of the innermost block that holds both the forward pass and the failing line (a loop body or
a function body) to the failing statement. What only keeps books (appending to lists, printing, saving, stepping the
optimizer) is left out unless the step depends on it. The names of a cut tell which variables hold the data of the step.
"""

from __future__ import annotations

import ast
import copy
from types import FrameType
from typing import Any

from torchmedic.source.assignments import names_read, names_written, read_first
from torchmedic.source.segment.standalone import Standalone
from torchmedic.source.syntax import (
    CALLABLES,
    LOOPS,
    Block,
    blocks,
    body_of,
    callee,
    calls_backward,
    function_name,
    has_line,
    innermost_block,
    is_module,
    loop_names,
    spans,
    spans_block,
    syntax_tree,
)

_LINE_END = 1 << 30
BOOKKEEPING = frozenset(
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
    gives_loss: bool = False,
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
        gives_loss: Whether the function returns the loss to a library, which calls backward: all of it is the step.
        outwards: How many loops to go out of, where what matters happened in earlier turns of the inner ones.
        tree: Other syntax for the same file, for a trial.

    Raises:
        CannotCut: The source is missing or does not hold these lines.
    """
    file = frame.f_code.co_filename
    tree = tree if tree is not None else syntax_tree(file, frame.f_globals)
    if tree is None:
        raise CannotCut(f"the source of {file} is missing")
    body = body_of(tree, frame)
    if body is None:
        raise CannotCut(f"`{frame.f_code.co_name}` is not in the source of {file}")
    lines = {line} if forward_line is None else {line, forward_line}
    block = innermost_block(body, lines)
    inner = innermost_block(body, {line})
    if inner is not block and forward_line is not None and not _feeds(block, forward_line, line):
        block = inner  # the first forward pass after the last update was another one, an evaluation say
    for _ in range(outwards):
        block = _block_around(body, block, line)
        if block is body and is_module(frame.f_code):
            raise CannotCut("the whole script would have to run again")
    point = (line, _LINE_END if column is None else column)
    statements = _truncate(block, point, include_failing)
    if not statements and block is not body:  # `for optimizer in optimizers: optimizer.step()`: the step is outside
        outer = _block_around(body, block, line)
        before = _truncate(outer, point, include_failing)
        is_step = any(map(_runs_backward, before)) and not (outer is body and is_module(frame.f_code))
        block, statements = (outer, before) if is_step else (block, statements)
    if gives_loss:
        statements = _to_the_loss(body, block)
    elif through_backward:
        statements = _go_on(statements, block, line)
    if not statements:
        raise CannotCut("no statement stands before the failing one")
    kept = _needed(statements, frame)
    prepared: Block = []
    for statement in kept:
        result = Standalone(frame, gives_loss=gives_loss).visit(copy.deepcopy(statement))
        prepared.extend(result if isinstance(result, list) else [result])
    return Segment(file, prepared, function_name(frame.f_code), block[0].lineno, line)


def carried_names(frame: FrameType, line: int) -> frozenset[str]:
    """Names that a loop body reads before it assigns them: their value comes from the iteration before."""
    body, block = _body_and_block(frame, line)
    assigned = {name for statement in block for name in names_written(statement)}
    return frozenset((read_first(block) & assigned) - loop_names(body, block))


def loops_around(frame: FrameType, line: int) -> int:
    """The number of loops of a function around one of its lines."""
    body = _body_and_block(frame, line)[0]
    return sum(isinstance(node, LOOPS) and has_line(node, line) for part in body for node in ast.walk(part))


def turn_around(frame: FrameType, line: int) -> Block:
    """The statements of the innermost loop around a line."""
    return _body_and_block(frame, line)[1]


def _body_and_block(frame: FrameType, line: int) -> tuple[Block, Block]:
    """The statements of a function, and those of the innermost loop around one of its lines."""
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    body = body_of(tree, frame) if tree is not None else None
    return (body, innermost_block(body, {line}, header_counts=True)) if body is not None else ([], [])


def _feeds(block: Block, forward_line: int, line: int) -> bool:
    """Whether what a forward pass leaves behind is read by the inner loop that holds a line."""
    results: set[str] = set()
    for statement in block:
        if spans(statement, {line}):
            return forward_line < line and not results.isdisjoint(names_read(statement))
        if spans(statement, {forward_line}) or not results.isdisjoint(names_read(statement)):
            results.update(names_written(statement))
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                    results.update(names_read(node.value))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    # `losses.append(model(x))`
                    function = node.value.func
                    if isinstance(function, ast.Attribute) and function.attr in BOOKKEEPING:
                        results.update(names_read(function.value))
    return True


def _block_around(body: Block, block: Block, line: int) -> Block:
    """The block that holds the loop whose body a block is."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, LOOPS) and node.body is block:
                return innermost_block(body, {line, node.lineno})
    raise CannotCut("there is no loop around it")


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
        inner = next((part for part in blocks(statement) if spans_block(part, {point[0]})), None)
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
        elif isinstance(statement, LOOPS) and not include_failing and not _truncate(inner, point, include_failing):
            pass  # its turns do nothing but what failed
        elif isinstance(statement, LOOPS | CALLABLES | ast.ClassDef):
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
    if any(_runs_backward(statement) for statement in statements):
        return statements
    at = next((number for number, statement in enumerate(block) if spans(statement, {line})), len(block))
    for number in range(at, len(block)):
        if _runs_backward(block[number]):
            return block[: number + 1]
    raise CannotCut("backward is not called from this frame")


def _to_the_loss(body: Block, block: Block) -> Block:
    returns = any(isinstance(node, ast.Return) and node.value is not None for part in body for node in ast.walk(part))
    if block is not body or not returns or any(map(_runs_backward, body)):
        raise CannotCut("the function returns no loss")
    return body


def _runs_backward(statement: ast.stmt) -> bool:
    """Whether a statement itself runs a backward pass; the definition of a function runs nothing."""
    return not isinstance(statement, CALLABLES | ast.ClassDef) and calls_backward(statement)


def _tensor_names(frame: FrameType) -> set[str]:
    # Asked of the type: some views raise at the mere look at their `grad_fn`.
    return {name for name, value in frame.f_locals.items() if hasattr(type(value), "grad_fn")}


def _needed(statements: Block, frame: FrameType) -> Block:
    """Leave out what only keeps books: an expression statement whose call is known to do no more than that."""
    last, tensors = len(statements) - 1, _tensor_names(frame)
    return [
        statement
        for position, statement in enumerate(statements)
        if position == last
        or not _is_bookkeeping(statement, statements[position + 1 :], tensors)
        or _updates_copy(statement, frame)
    ]


def _updates_copy(statement: ast.stmt, frame: FrameType) -> bool:
    """Whether a call of `update` is given a model, as in `ema.update(model)`: it is no counter and no progress bar."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="update"), args=args)):
            return any(hasattr(type(_value(given, frame)), "named_parameters") for given in args)
    return False


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name or an attribute, or that on which a method is called; nothing of the user's is run."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            held = vars(found) if hasattr(found := _value(owner, frame), "__dict__") else {}
            return held.get(name, held.get("_modules", {}).get(name))
        case ast.Call(func=ast.Attribute(value=owner)):
            return _value(owner, frame)
    return None


def _is_bookkeeping(statement: ast.stmt, rest: Block, tensors: set[str]) -> bool:
    if isinstance(statement, ast.Assert | ast.Pass | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return not isinstance(statement, ast.Import | ast.ImportFrom)
    if isinstance(statement, ast.AugAssign):
        # `total += loss.item()` keeps books; `loss += aux` does not, nor does what writes to a tensor's memory.
        name = statement.target.id if isinstance(statement.target, ast.Name) else None
        return name is not None and name not in tensors and not any(name in names_read(later) for later in rest)
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    return callee(statement.value) in BOOKKEEPING
