"""Try a patch of several lines on the failing step: the patched source, compiled and run in place of the original.

The patched syntax is given the line numbers of the old file, so that the statements of the step are found in it, and
functions are recognised.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.replay.step.step import Step
from torchmedic.replay.step.trial import Codes, Verdict, codes_in, describe, functions_of, passes, swapped
from torchmedic.source.syntax import is_module
from torchmedic.source.unified_diff import BadPatch, Hunk, applied, old_numbers, parse
from torchmedic.source.user_code import is_user_file


class _Patched(NamedTuple):
    """A file after the patch. `changed` are the numbers of the old lines that are different."""

    file: str
    tree: ast.Module
    changed: frozenset[int]


def attempt_patch(step: Step, patch: str) -> Verdict:
    """Replay the step with a patch. It passes if the step ends with a finite loss and finite gradients.

    Raises:
        BadPatch: The patch does not fit, is no Python, or changes nothing that the step runs.
        CannotCut: The patched step cannot be cut out of its frame.
    """
    own = step.frame.f_code.co_filename
    files = [_patched(_file(name, own), hunks) for name, hunks in parse(patch).items()]
    ran: set[tuple[str, int]] = set()  # file and first line of the functions of patched files that ran
    names = {each.file for each in files}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename in names:
            ran.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    tree = next((each.tree for each in files if each.file == own), None)
    with contextlib.ExitStack() as swaps:
        spans = [span for each in files for span in swaps.enter_context(_swapped(each))]
        previous = sys.getprofile()
        sys.setprofile(note)
        try:
            played = step.again(tree)
        finally:
            sys.setprofile(previous)
    first, last = step.segment.lines[0], step.segment.lines[-1]
    in_step = any(each.file == own and any(first <= line <= last for line in each.changed) for each in files)
    in_functions = any((file, start) in ran for file, start, touched in spans if touched)
    if not in_step and not in_functions:
        raise BadPatch(
            "the patch changes nothing that the failing step runs; code that ran before the step, such as the "
            "construction of the model or the optimizer, is not run again"
        )
    return Verdict(passes(played), describe(played), patch)


def _file(name: str, own: str) -> str:
    """The path of a file that a patch names.

    Raises:
        BadPatch: There is no such file among those of the user that were imported.
    """
    loaded = {own, *(str(getattr(module, "__file__", "") or "") for module in list(sys.modules.values()))}
    wanted = os.path.abspath(name)
    ends = [file for file in loaded if file and (os.path.abspath(file) == wanted or file.endswith(f"/{name}"))]
    exact = [file for file in ends if os.path.abspath(file) == wanted] or ends
    if len(exact) != 1 or not is_user_file(exact[0]):
        raise BadPatch(f"{name} is not a file of the script that was imported")
    return exact[0]


def _patched(file: str, hunks: Sequence[Hunk]) -> _Patched:
    before = [line.rstrip("\n") for line in linecache.getlines(file)]
    after = applied(before, hunks)
    try:
        tree = ast.parse("\n".join(after) + "\n", file)
    except SyntaxError as error:
        raise BadPatch(f"the patched {os.path.basename(file)} is no Python: {error.msg}, line {error.lineno}") from None
    numbers = old_numbers(before, after)
    _renumber(tree, numbers)
    pairs = list(zip(after, numbers, strict=True))
    kept = {number for text, number in pairs if before[number - 1] == text}
    added = {number for text, number in pairs if before[number - 1] != text}
    return _Patched(file, tree, frozenset((set(range(1, len(before) + 1)) - kept) | added))


def _renumber(tree: ast.Module, numbers: list[int]) -> None:
    """Give the nodes the line numbers of the old file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno = numbers[node.lineno - 1]
            node.end_lineno = max(node.lineno, numbers[(node.end_lineno or 1) - 1])
            if node.end_lineno == node.lineno:
                node.end_col_offset = max(node.col_offset, node.end_col_offset or 0)


@contextlib.contextmanager
def _swapped(patched: _Patched) -> Iterator[list[tuple[str, int, bool]]]:
    """Give the living functions of a file their new code, for a while.

    Yields:
        For every function its file, its first line, and whether the patch changes it.
    """
    found = list(codes_in(compile(patched.tree, patched.file, "exec", dont_inherit=True)))
    count = Counter(code.co_qualname for code in found)
    codes: Codes = {code.co_qualname: code for code in found if count[code.co_qualname] == 1}
    codes |= {(code.co_qualname, code.co_firstlineno): code for code in found}
    functions = [each for each in functions_of(patched.file) if not is_module(each.__code__)]
    with swapped(functions, codes) as changed:
        spans = []
        for pair in changed:
            lines = {line for code in pair for inner in codes_in(code) for *_, line in inner.co_lines() if line}
            spans.append((patched.file, pair[1].co_firstlineno, bool(lines & patched.changed)))
        yield spans
