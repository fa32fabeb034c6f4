"""Try a cure on the failing step: the user's own line, edited, compiled and run in place of the original."""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import linecache
import math
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from torchmedic.records import Safety, Treatment
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.live_frames import by_method_name, by_span
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import syntax_tree
from torchmedic.source.user_code import relative

Codes = dict[tuple[str, int] | str, CodeType]  # by qualified name and first line, or by name alone


class Edit(NamedTuple):
    """Other text for one expression (or a whole line) of the source."""

    spot: Spot
    text: str


class Verdict(NamedTuple):
    """What a trial showed."""

    passed: bool
    result: str
    patch: str


def source_of(spot: Spot) -> str:
    """The text of an expression as it stands in the file."""
    lines = linecache.getlines(spot.file)
    if spot.column is None or spot.end_column is None or not 0 < spot.line <= len(lines):
        return lines[spot.line - 1].strip() if 0 < spot.line <= len(lines) else ""
    end = spot.end_line or spot.line
    if end == spot.line:
        return lines[spot.line - 1].encode()[spot.column : spot.end_column].decode(errors="replace")
    first = lines[spot.line - 1].encode()[spot.column :].decode(errors="replace")
    last = lines[end - 1].encode()[: spot.end_column].decode(errors="replace")
    return "".join([first, *lines[spot.line : end - 1], last])


def node_at(spot: Spot) -> tuple[ast.expr, Spot] | None:
    """The expression at a spot as a part of its file's syntax, and the whole place that it takes."""
    tree = syntax_tree(spot.file)
    if tree is None or spot.column is None or spot.end_column is None:
        return None
    found = by_span(tree).get((spot.line, spot.column, spot.end_line or spot.line, spot.end_column))
    # A method on a line below its object is given the position of the method's name.
    node = found[0] if found else by_method_name(tree).get((spot.line, spot.column))
    if node is None:
        return None
    return node, spot_of_node(spot.file, node, spot.function)


def edited(edit: Edit) -> tuple[str, str]:
    """The whole source after an edit, with as many lines as before, and the edit as a unified diff."""
    spot = edit.spot
    lines = list(linecache.getlines(spot.file))
    if not 0 < spot.line <= len(lines):
        raise CannotCut("the source is missing")
    end = spot.end_line or spot.line
    before = lines[spot.line - 1 : end]
    if spot.column is None or spot.end_column is None:
        indent = before[0][: len(before[0]) - len(before[0].lstrip())]
        new = indent + edit.text + "\n"
    else:
        head = before[0].encode()[: spot.column].decode()
        tail = before[-1].encode()[spot.end_column :].decode()
        new = head + edit.text + tail
    lines[spot.line - 1 : end] = [new, *["\n"] * (end - spot.line)]
    name = relative(spot.file)
    span = f"{spot.line}" if end == spot.line else f"{spot.line},{end - spot.line + 1}"
    diff = [f"--- {name}", f"+++ {name}", f"@@ -{span} +{spot.line} @@"]
    diff += [f"-{line.rstrip()}" for line in before]
    diff.append(f"+{new.rstrip()}")
    return "".join(lines), "\n".join(diff)


def attempt(
    step: Step,
    edit: Edit,
    *,
    same_loss: float | None = None,
    close_loss: float | None = None,
    same_values: bool = False,
    keep_graphs: bool = True,
    accepts: Callable[[ReplayResult], bool] | None = None,
) -> Verdict:
    """Replay the step with an edited line. It passes if the step ends with a finite loss and finite gradients.

    Args:
        step: The failing step.
        edit: The cure.
        same_loss: The loss that it must end with, where that was right.
        close_loss: The same, where the cure may change it a little.
        same_values: Whether the elements of the expression that were finite must stay as they were, nearly.
        keep_graphs: Whether every backward keeps its graph, or only where the code says so.
        accepts: What else must hold of the replay.
    """
    comparison = Comparison()
    compared = same_values and not _UNREPEATABLE.search(source_of(edit.spot))
    try:
        source, patch = edited(edit)
        if compared:
            original = ast.unparse(ast.parse(f"({source_of(edit.spot)}\n)", mode="eval"))  # on one line, no comments
            text = f"{Comparison.NAME}(({edit.text}), ({original}))"
            source, _ = edited(edit._replace(text=text))
        tree = ast.parse(source, edit.spot.file)
    except (CannotCut, SyntaxError, UnicodeError):
        return Verdict(False, "", "")
    module = compile(tree, edit.spot.file, "exec", dont_inherit=True)
    codes: Codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(module)}
    functions = [each for each in functions_of(edit.spot.file) if _holds(each, edit.spot.line)]
    with comparison, swapped(functions, codes):
        played = step.again(tree if edit.spot.file == step.frame.f_code.co_filename else None, keep_graphs=keep_graphs)
    passed = (
        passes(played)
        and (same_loss is None or _close(played.loss, same_loss))
        and (close_loss is None or _close(played.loss, close_loss, 1e-2, 1e-3))
        and comparison.agreed
        and (accepts is None or accepts(played))
    )
    result = describe(played)
    if not passed and passes(played):
        result += "; results that were right have changed"
    return Verdict(passed, result, patch)


# Evaluated a second time, these would draw other numbers or change their operand again.
_UNREPEATABLE = re.compile(r"rand|dropout|sample|bernoulli|multinomial|gumbel|\w_\(|next\(|:=|yield|await")


class Comparison:
    """What an edited expression gives beside what the original gives, on the elements where that was finite."""

    NAME = "__torchmedic_compare__"

    def __init__(self) -> None:
        self.agreed = True

    def __enter__(self) -> Comparison:
        setattr(builtins, self.NAME, self)
        return self

    def __exit__(self, *exception: object) -> None:
        delattr(builtins, self.NAME)

    def __call__(self, new: Any, old: Any) -> Any:
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.shape == old.shape and old.numel():
            with torch.no_grad():
                healthy = torch.isfinite(old)
                given, wanted = new.detach()[healthy].double(), old.detach()[healthy].double()
                scale = float(wanted.abs().median().item()) if wanted.numel() else 1.0
                self.agreed &= torch.allclose(given, wanted, rtol=1e-2, atol=1e-3 * max(scale, 1e-3))
        return new


def _close(loss: float | None, wanted: float, relative: float = 1e-5, absolute: float = 1e-7) -> bool:
    return loss is not None and math.isclose(loss, wanted, rel_tol=relative, abs_tol=absolute)


def treatment(title: str, verdict: Verdict, *, safety: Safety = "edit") -> Treatment | None:
    """A proven treatment, or None where the trial did not pass."""
    if not verdict.passed:
        return None
    return Treatment(title=title, safety=safety, proven=True, result=verdict.result, patch=verdict.patch)


def passes(played: ReplayResult) -> bool:
    return played.error is None and bool(played.roots) and played.loss_finite and played.gradients_finite is True


def describe(played: ReplayResult) -> str:
    """The outcome of a trial in a few words."""
    if played.error is not None:
        return f"{type(played.error).__name__}: {played.error}".splitlines()[0][:120]
    loss = f"loss {played.loss + 0.0:.5g}" if played.loss is not None else "no loss"
    if not played.gradients_finite:
        return f"{loss}, gradients not finite"
    return f"{loss}, all gradients finite"


@contextlib.contextmanager
def swapped(functions: Iterable[FunctionType], codes: Codes) -> Iterator[list[tuple[CodeType, CodeType]]]:
    """Give living functions new code for a while. Yields the old code and the new code of each."""
    changed: list[tuple[FunctionType, CodeType]] = []
    try:
        for function in functions:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno)) or codes.get(old.co_qualname)
            if new is not None and new.co_freevars == old.co_freevars:
                changed.append((function, old))
                function.__code__ = new
        yield [(old, function.__code__) for function, old in changed]
    finally:
        for function, code in changed:
            function.__code__ = code


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all code objects that are constants in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def functions_of(file: str) -> list[FunctionType]:
    """The living functions of a file."""
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    return [each for each in functions if each.__code__.co_filename == file]


def _holds(function: FunctionType, line: int) -> bool:
    """Whether the source of a function, functions in it included, holds a line."""
    code = function.__code__
    lines = [number for inner in codes_in(code) for *_, number in inner.co_lines() if number is not None]
    return bool(lines) and code.co_firstlineno <= line <= max(lines)
