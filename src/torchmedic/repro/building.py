"""Builds a program from an operation and its live arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchmedic.replay.trace.microscope import Captured
from torchmedic.repro.arguments import Inputs
from torchmedic.repro.aten import Spelling, hints
from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Line, Recipe


def called(spelling: Spelling, names: list[str], inputs: Inputs, *, result: str = "result") -> Line:
    """The line of a recipe for a spelling; its tensors become inputs."""
    padded = [*names, *[""] * len(spelling.args)]
    return Line(
        target=spelling.target,
        args=tuple(inputs.argument(value, hint) for value, hint in zip(spelling.args, padded, strict=False)),
        kwargs={key: inputs.argument(value, key) for key, value in spelling.kwargs.items()},
        result=result,
    )


def named(captured: Captured, spelling: Spelling) -> list[str]:
    """Names for the arguments of a spelling, whose order may differ from the operation's."""
    known = {
        id(value): hint
        for value, hint in zip(captured.args, hints(captured.func, captured.args), strict=False)
        if isinstance(value, torch.Tensor)
    }
    return [known.get(id(value), "") for value in spelling.args]


def made(header: Recipe, inputs: Inputs, lines: list[Line], outcome: Any) -> Program:
    recipe = msgspec.structs.replace(header, inputs=tuple(inputs.specs), lines=tuple(lines), outcome=outcome)
    return Program(recipe, inputs.tensors)
