"""The calls of a recipe as Python source. The search for a smaller program executes the same text as the script."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchmedic.errors import UnreadableRun
from torchmedic.records import Diagnosis
from torchmedic.repro.recipe import (
    INFIX,
    PREFIX,
    Argument,
    Bad,
    Line,
    Many,
    Plain,
    Raises,
    Recipe,
    Ref,
    Slice,
    Special,
    read,
    recipes,
)
from torchmedic.runfolder import layout
from torchmedic.runfolder.confidential import is_confidential

_CONSTANTS = {"inf": "torch.inf", "-inf": "-torch.inf", "nan": "torch.nan"}


def argument(given: Argument) -> str:
    if isinstance(given, Ref):
        return given.name
    if isinstance(given, Plain):
        return ascii(given.value)
    if isinstance(given, Special):
        return _CONSTANTS.get(given.text, given.text)
    if isinstance(given, Slice):
        return f"slice({', '.join(argument(part) for part in given.parts)})"
    items = ", ".join(argument(item) for item in given.items)
    if given.kind == "list":
        return f"[{items}]"
    return f"({items},)" if len(given.items) == 1 else f"({items})"


def call(line: Line) -> str:
    """The expression of one call or, for an in-place assignment, the statement."""
    args = [argument(given) for given in line.args]
    kind, _, name = line.target.rpartition(".")
    if kind == "operator":
        return _operator(name, line.args, args)
    named = [f"{key}={argument(given)}" for key, given in line.kwargs.items()]
    if line.target == "call":
        return f"{args[0]}({', '.join([*args[1:], *named])})"
    if line.target == "sum_backward":
        return f"{args[0]}.sum().backward()"
    if kind == "Tensor":
        return f"{args[0]}.{name}({', '.join([*args[1:], *named])})"
    return f"{line.target}({', '.join([*args, *named])})"


def statement(line: Line) -> str:
    """One line of source; two with `no_grad`."""
    text = call(line)
    in_place = line.target in ("operator.setitem", "operator.delitem") or line.target.startswith("operator.i")
    if line.result and (not in_place or line.target == "operator.invert"):
        text = f"{line.result} = {text}"
    if line.note:
        text += f"  # {_one_line(line.note)}"
    return f"with torch.no_grad():\n    {text}" if line.no_grad else text


def _operator(name: str, given: tuple[Argument, ...], args: list[str]) -> str:
    if name in PREFIX:
        return f"{PREFIX[name]}{args[0]}"
    if name == "getitem":
        return f"{args[0]}[{_subscript(given[1])}]"
    if name == "setitem":
        return f"{args[0]}[{_subscript(given[1])}] = {args[2]}"
    left, right = (f"({text})" if text.startswith("-") else text for text in args)
    return f"{left} {INFIX[name]} {right}"


def _subscript(index: Argument) -> str:
    if isinstance(index, Many) and index.kind == "tuple" and index.items:
        return ", ".join(_subscript_part(item) for item in index.items) + ("," if len(index.items) == 1 else "")
    return _subscript_part(index)


def _subscript_part(index: Argument) -> str:
    if not isinstance(index, Slice):
        return argument(index)
    start, stop, step = ("" if part == Plain(None) else argument(part) for part in index.parts)
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def _one_line(text: str) -> str:
    """Text for a comment: without line breaks and in ASCII, so that it ends where the line ends."""
    return ascii(" ".join(text.split()))[1:-1]


def recorded_call(run: Path, diagnosis: Diagnosis) -> str:
    """The recording that belongs to a diagnosis as source text; empty if there is none, or if it is damaged."""
    if is_confidential(run):
        return ""
    for folder in layout.process_folders(run):
        for path in recipes(folder):
            with contextlib.suppress(UnreadableRun):
                held = read(path)
                if (held.code, held.message) == (diagnosis.code, diagnosis.message) and not held.why_not:
                    return _text(held)
    return ""


def _text(recipe: Recipe) -> str:
    """Inputs, calls and outcome, a line each. Values are left out: `torchmedic repro` writes a script with them."""
    lines = [f"# {each.name}: {each.dtype} {list(each.shape)} on {each.device}" for each in recipe.inputs]
    lines += [statement(line) for line in recipe.lines]
    outcome = recipe.outcome
    if isinstance(outcome, Raises):
        lines.append(f"# raises {outcome.kind}")
    elif isinstance(outcome, Bad):
        what = f"the gradient of {outcome.of}" if outcome.gradient else outcome.of
        lines.append(f"# {what} holds {'NaN' if outcome.kind == 'nan' else 'infinity'}")
    return "\n".join(lines)
