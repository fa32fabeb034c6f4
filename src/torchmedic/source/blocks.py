"""Blocks of statements in a syntax tree: those of a function, of a loop, and which of them holds a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

from torchmedic.source.syntax import CALLABLES, FUNCTIONS, LOOPS, first_line

Block = list[ast.stmt]


def body_of(tree: ast.Module, frame: FrameType) -> Block | None:
    if frame.f_code.co_name == "<module>":
        return tree.body
    first = frame.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name == frame.f_code.co_name and first_line(node) == first:
            return node.body
    return None


def innermost_block(body: Block, lines: set[int], *, header_counts: bool = False) -> Block:
    """The body of the innermost loop that holds all lines, else the whole body.

    A loop that fetches its next item is at its header; `header_counts` takes that for its body.
    """
    best = body
    candidates = list(body)
    while candidates:
        found: ast.stmt | None = None
        for statement in candidates:
            if spans(statement, lines):
                found = statement
                break
        if found is None or isinstance(found, CALLABLES | ast.ClassDef):
            return best
        candidates = []
        for block in blocks(found):
            if isinstance(found, LOOPS) and block is found.body:
                at_header = header_counts and all(found.lineno <= line < block[0].lineno for line in lines)
                if at_header or spans_block(block, lines):
                    best = block
            candidates.extend(block)
    return best


def loop_names(body: Block, block: Block) -> set[str]:
    """The names that the header of a loop gives new values to: they do not come from the iteration before."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.For | ast.AsyncFor) and node.body is block:
                return {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return set()


def blocks(statement: ast.stmt) -> Iterator[Block]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def spans(statement: ast.stmt, lines: set[int]) -> bool:
    return all(statement.lineno <= line <= (statement.end_lineno or statement.lineno) for line in lines)


def spans_block(block: Block, lines: set[int]) -> bool:
    return all(block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno) for line in lines)
