"""The frames of a running step or of a traceback, with the exact expression that each is evaluating (PEP 657)."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from torchmedic.records import Location, Role
from torchmedic.source.syntax import function_name, function_tree, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file, relative, source_line

# Frames with the line and column that each is at, innermost first.
Stack = list[tuple[FrameType, int, int | None]]
Position = tuple[int | None, int | None, int | None, int | None]
_UNKNOWN: Position = (None, None, None, None)


class Frame:
    """One live frame: its position, its variables, and the syntax node that was being evaluated."""

    def __init__(self, frame: FrameType, lasti: int, lineno: int) -> None:
        self.live = frame
        self.file = frame.f_code.co_filename
        self.function = function_name(frame.f_code)
        self.is_user = is_user_file(self.file)
        self._lasti = lasti
        line, end_line, column, end_column = position_of(frame.f_code, lasti)
        self.line = line or lineno
        self.end_line = end_line or self.line
        self._column = column
        self._end_column = end_column

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        return self.live.f_locals

    @property
    def module(self) -> torch.nn.Module | None:
        """The nn.Module whose method this is."""
        owner = self.variables.get("self")
        return owner if isinstance(owner, torch.nn.Module) else None

    @functools.cached_property
    def node(self) -> ast.expr | None:
        """The expression under evaluation: a call, an operator, a subscript."""
        if self._column is None or self._end_column is None or self.tree is None:
            return None
        found = by_span(self.tree).get((self.line, self._column, self.end_line, self._end_column))
        if found:
            return found[0]
        # A method on a line below its object is given the position of the method's name.
        chained = by_method_name(self.tree).get((self.line, self._column))
        if chained is None:
            return None
        return chained.func if self.instruction in ("LOAD_ATTR", "LOAD_METHOD") else chained

    @functools.cached_property
    def statement(self) -> ast.stmt | None:
        """The innermost statement that holds the expression under evaluation."""
        return statement_around(self.tree, self.line, self._column) if self.tree is not None else None

    @functools.cached_property
    def tree(self) -> ast.Module | None:
        """The syntax of the user's file; in a library, that of the function alone."""
        known = None if self.is_user else function_tree(self.live.f_code, self.live.f_globals)
        return known or syntax_tree(self.file, self.live.f_globals)

    @property
    def instruction(self) -> str:
        """The name of the bytecode instruction that raised."""
        code = self.live.f_code.co_code
        return dis.opname[code[self._lasti]] if 0 <= self._lasti < len(code) else ""

    def lookup(self, name: str) -> Any:
        """A variable as this frame sees it. Raises KeyError if there is none of that name, or its value is gone."""
        if name in self._inlined_names:
            raise KeyError(name)
        if name in self.variables:
            return self.variables[name]
        if name in self.live.f_globals:
            return self.live.f_globals[name]
        return self.live.f_builtins[name]

    @functools.cached_property
    def _inlined_names(self) -> frozenset[str]:
        """Loop variables of the comprehension under evaluation, where Python (3.12) runs it in its function's frame.

        Their values are gone when the exception leaves, and an outer variable of the same name is back.
        """
        statement, column = self.statement, self._column
        in_own_frame = sys.version_info < (3, 12) or self.function in ("<listcomp>", "<setcomp>", "<dictcomp>")
        if statement is None or column is None or in_own_frame:
            return frozenset()
        inside = (
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp) and _covers(node, self.line, column)
        )
        return frozenset(
            part.id
            for node in inside
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name)
        )

    def location(self, role: Role, label: str = "", node: ast.AST | None = None) -> Location:
        """The expression of the frame, or another node of the same file, as a labelled place."""
        if node is None:
            return place(role, self.file, self.line, label, self._column, self._end_column, self.end_line)
        return node_location(role, self.file, node, label)


def node_location(role: Role, file: str, node: Any, label: str = "") -> Location:
    return place(role, file, node.lineno, label, node.col_offset, node.end_col_offset, node.end_lineno)


def place(
    role: Role,
    file: str,
    line: int,
    label: str = "",
    column: int | None = None,
    end_column: int | None = None,
    end_line: int | None = None,
) -> Location:
    """A location from byte offsets counted from 0, as Python gives them; the whole line where it gives none."""
    text = source_line(file, line)
    data = text.encode()
    if column is None or end_column is None:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    else:
        start = len(data[:column].decode(errors="replace"))
        end = len(data[:end_column].decode(errors="replace"))
        if end_line not in (None, line):
            # It goes on below: mark the rest of this line, but not a comment behind it.
            end = start + len(re.split(r"\s+#", text[start:])[0].rstrip())
    return Location(
        role=role,
        file=relative(file),
        line=line,
        column=start + 1,
        end_column=max(start + 1, end) + 1 if end <= start else end + 1,
        code=text.strip(),
        indent=len(text) - len(text.lstrip()),
        label=label,
    )


def _covers(node: ast.expr | ast.stmt, line: int, column: int | None) -> bool:
    if column is None:
        return has_line(node, line)
    end = (node.end_lineno or node.lineno, max(node.end_col_offset or 0, 1))
    return (node.lineno, node.col_offset) <= (line, column) < end


def frames_of(tb: TracebackType | None) -> list[Frame]:
    """Outermost first, as in a printed traceback, without the detour that a call takes through the default device."""
    frames: list[Frame] = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if code.co_name == "handle_torch_function" and code.co_filename.endswith(_OVERRIDES):
            if frames:
                frames.pop()  # the function whose call takes the detour; its own frame comes again below
        elif not (code.co_name == "__torch_function__" and code.co_filename.endswith(_DEFAULT_DEVICE)):
            # A signal handler may raise at an instruction that has no line.
            frames.append(Frame(tb.tb_frame, tb.tb_lasti, tb.tb_lineno or code.co_firstlineno))
        tb = tb.tb_next
    return frames


_OVERRIDES = "torch/overrides.py".replace("/", os.sep)
_DEFAULT_DEVICE = "torch/utils/_device.py".replace("/", os.sep)


def stack_of(frame: FrameType | None) -> list[Frame]:
    """A live frame and all that called it, outermost first."""
    frames: list[Frame] = []
    while frame is not None:
        frames.append(Frame(frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


Span = tuple[int, int, int, int]


def expressions(file: str, module_globals: dict[str, Any] | None = None) -> dict[Span, list[ast.expr]]:
    """Every expression of a file by its span; the outermost first where several share one."""
    tree = syntax_tree(file, module_globals)
    return by_span(tree) if tree is not None else {}


@functools.lru_cache(maxsize=64)
def _statements(tree: ast.Module) -> tuple[ast.stmt, ...]:
    return tuple(node for node in nodes_in(tree) if isinstance(node, ast.stmt))


@functools.lru_cache(maxsize=1024)  # a recursion comes a thousand times past the same places
def statement_around(tree: ast.Module, line: int, column: int | None) -> ast.stmt | None:
    """The innermost statement at a line and column; the last one of the line where the column is not known."""
    covering = [node for node in _statements(tree) if _covers(node, line, column)]
    return covering[-1] if covering else None  # breadth first: what comes later lies deeper


@functools.lru_cache(maxsize=64)
def by_span(tree: ast.Module) -> dict[Span, list[ast.expr]]:
    found: dict[Span, list[ast.expr]] = {}
    for node in _expressions_of(tree):
        if node.end_lineno is not None and node.end_col_offset is not None:
            found.setdefault((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset), []).append(node)
    return found


@functools.lru_cache(maxsize=64)
def by_method_name(tree: ast.Module) -> dict[tuple[int, int], ast.Call]:
    """Method calls that begin on an earlier line than the name of their method, by the position of that name."""
    found: dict[tuple[int, int], ast.Call] = {}
    for node in _expressions_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func
            if name.end_lineno is not None and name.end_col_offset is not None and name.end_lineno != name.lineno:
                found[name.end_lineno, name.end_col_offset - len(name.attr.encode())] = node
    return found


def _expressions_of(tree: ast.Module) -> Iterator[ast.expr]:
    return (node for node in nodes_in(tree) if isinstance(node, ast.expr))


def stack_at(frame: FrameType | None) -> Stack:
    """A frame that is running, and those above it."""
    stack: Stack = []
    while frame is not None:
        stack.append((frame, *point_of(frame, frame.f_lasti, frame.f_lineno)))
        frame = frame.f_back
    return stack


def frames_of_traceback(tb: TracebackType | None, within: FrameType | None = None) -> Stack:
    """The frames that an exception came through, down to one of them."""
    entries: Stack = []
    while tb is not None:
        entries.append((tb.tb_frame, *point_of(tb.tb_frame, tb.tb_lasti, tb.tb_lineno)))
        tb = tb.tb_next if tb.tb_frame is not within else None
    return entries[::-1]


def stack_of_traceback(tb: TracebackType | None, within: FrameType | None = None) -> Stack:
    """The frames that an exception came through, and those above the frame that caught it."""
    entries = frames_of_traceback(tb, within)
    return entries + (stack_at(entries[-1][0].f_back) if entries else [])


def point_of(frame: FrameType, lasti: int, line: int) -> tuple[int, int | None]:
    """Line and column of the expression that a frame is evaluating."""
    start, _, column, _ = position_of(frame.f_code, lasti)
    return start or line, column


def position_of(code: CodeType, lasti: int) -> Position:
    """Line, end line, column and end column of an instruction (PEP 657), as far as Python knows them."""
    return next(itertools.islice(code.co_positions(), lasti // 2, None), _UNKNOWN) if lasti >= 0 else _UNKNOWN
