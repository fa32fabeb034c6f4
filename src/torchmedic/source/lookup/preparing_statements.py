"""The statements of a function that made a variable what it was when a later line was reached.

A slice of the function: from the last statement backwards, all that gives a value to a name that is needed, or writes
into it. What draws random numbers needs its seed, so calls that set one are part of every slice.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import NamedTuple

from torchmedic.source.lookup.line_accesses import Accesses, of_nodes
from torchmedic.source.syntax import FUNCTIONS, blocks, callee, has_line

_MAX_STATEMENTS = 200
_DEFINING = FUNCTIONS | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal
_SEEDING = frozenset({"manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"})


class Slice(NamedTuple):
    """Statements in their order, with the names that they take over from before, and write into."""

    statements: list[ast.stmt]
    overwritten: frozenset[str]


def statements_making(
    name: str, body: list[ast.stmt], line: int, fixed: Set[str], *, last: ast.stmt | None = None
) -> Slice:
    """The statements of a function, or of a module, that made a variable before a line was reached.

    Args:
        name: The variable. There are no statements where none gives it a value.
        body: Of the function or the module.
        line: The line that is running; 0 where the whole body has run.
        fixed: Names whose values are taken as they are now, such as modules and functions.
        last: A further statement, which is taken as the last one.
    """
    needed = {name}
    fixed = fixed - needed
    kept: list[ast.stmt] = []
    bound: set[str] = set()
    written: set[str] = set()
    for statement in reversed([*_before(body, line), *([last] if last is not None else [])]):
        accesses = of_nodes([statement])
        touched = {path[0] for path in accesses.writes} - fixed
        if not (touched & needed or _is_seeding(statement)) or isinstance(statement, _DEFINING):
            continue
        kept.append(statement)
        needed |= {path[0] for path in accesses.reads} - fixed
        # Read backwards: what an earlier statement binds is new, whatever the later ones write into it.
        new = _rebound(statement, accesses)
        written = (written | touched) - new
        bound |= new
    return Slice(kept[::-1] if name in bound and len(kept) <= _MAX_STATEMENTS else [], frozenset(written))


def _rebound(statement: ast.stmt, accesses: Accesses) -> set[str]:
    """The names that a statement gives a new object, whatever path is taken through it."""
    is_plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.With | ast.For)
    return set(accesses.binds) if is_plain else set()


def _before(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """The statements that were run to their end before a line, in all blocks around it."""
    found: list[ast.stmt] = []
    for statement in body:
        if line and has_line(statement, line):
            for block in blocks(statement):
                if any(has_line(inner, line) for inner in block):
                    found += _before(list(block), line)
            return found
        if line and statement.lineno > line:
            return found
        found.append(statement)
    return found


def _is_seeding(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and callee(statement.value) in _SEEDING
    )
