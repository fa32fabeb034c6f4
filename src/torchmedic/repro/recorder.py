"""In the failing process: keep the operation that failed, small and without anything that could not be read back.

Bounded in size, and nothing here is worth more than the diagnosis: that one is written first, a fault is contained, and
a run that was started with `--confidential` keeps nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from torchmedic.contained import report_fault
from torchmedic.detect.failures.device_errors import is_sticky
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.context import StepContext
from torchmedic.records import Diagnosis
from torchmedic.repro import allowed, nonfinite, raised, recipe, subgraphs
from torchmedic.repro.arguments import NotRecordable
from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Recipe
from torchmedic.repro.search import Budget
from torchmedic.repro.shrink import shrunk
from torchmedic.repro.store import encoded
from torchmedic.runfolder.confidential import is_confidential

_MAX_BYTES = 32 << 20  # of the inputs of a recorded operation
_SHRINK = Budget(queries=60, seconds=5.0)


class Recording:
    """What will be written beside a diagnosis."""

    def __init__(self, recipe: Recipe, program: Program | None = None) -> None:
        self.recipe = recipe
        self.program = program

    def write(self, folder: Path, number: int) -> None:
        try:
            values = encoded(self.program) if self.program is not None else None
            recipe.write(recipe.json_path(folder, number), self.recipe, values)
        except OSError:
            return  # a full disk: the diagnosis is there, and says enough
        except Exception as error:
            report_fault("repro.recorder", error)


def of_numbers(evidence: NumbersEvidence, diagnosis: Diagnosis, agent: StepContext) -> Recording | None:
    """The operation that made a number NaN or infinite."""
    return _recorded(diagnosis, agent, lambda header: nonfinite.program(evidence, header))


def of_exception(evidence: RaisedEvidence, diagnosis: Diagnosis, agent: StepContext) -> Recording | None:
    """The operation that raised."""
    return _recorded(
        diagnosis, agent, lambda header: subgraphs.program(evidence, header) or raised.program(evidence, header)
    )


def _recorded(diagnosis: Diagnosis, agent: StepContext, make: Callable[[Recipe], Program]) -> Recording | None:
    """None where nothing may be kept, or where a bug of ours came in between."""
    try:
        if is_confidential(agent.run):
            return None
        header = _header(diagnosis)
        try:
            program = _small(make(header))
            allowed.check(program.recipe)
        except (NotRecordable, ValueError) as reason:
            return Recording(msgspec.structs.replace(header, why_not=str(reason)))
        return Recording(program.recipe, program)
    except Exception as error:
        if is_sticky(error):
            return Recording(msgspec.structs.replace(_header(diagnosis), why_not="its inputs are lost with the device"))
        report_fault("repro.recorder", error)
        return None


def _small(program: Program) -> Program:
    if program.bytes > _MAX_BYTES:
        program = shrunk(program, _SHRINK, enough=_MAX_BYTES)
    if program.bytes > _MAX_BYTES:
        raise NotRecordable(f"its inputs take {program.bytes >> 20} MiB")
    return program


def _header(diagnosis: Diagnosis) -> Recipe:
    place = diagnosis.cause_location
    return Recipe(
        code=diagnosis.code,
        name=diagnosis.name,
        message=diagnosis.message,
        place=f"{place.file}:{place.line}" if place is not None else "",
        source=place.code if place is not None else "",
        torch=str(torch.__version__),
        python=platform.python_version(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
