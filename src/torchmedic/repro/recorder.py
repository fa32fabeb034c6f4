"""In the failing process: keep the operation that failed, small and without anything that could not be read back.

Bounded in size, and nothing here is worth more than the diagnosis: that one is written first, a fault is contained, and
a run that was started with `--confidential` keeps nothing.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchmedic.contained import report_fault
from torchmedic.detect.failures.device_errors import is_sticky
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.context import StepContext
from torchmedic.records import Diagnosis
from torchmedic.replay.trace.microscope import Captured, Op
from torchmedic.repro import allowed, raised, recipe, subgraphs
from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.aten import Spelling, spellings
from torchmedic.repro.program import Program, badness, called, made, named
from torchmedic.repro.recipe import Bad, Line, Plain, Recipe, Ref
from torchmedic.repro.search import Budget
from torchmedic.repro.shrink import shrunk
from torchmedic.repro.store import encoded
from torchmedic.runfolder.confidential import is_confidential

_MAX_BYTES = 32 << 20  # bytes of the inputs of a recorded operation
_SHRINK = Budget(queries=60, seconds=5.0)
_MAX_DERIVATIVE_OPS = 3  # each may need another replay


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
    return _recorded(diagnosis, agent, lambda header: program_of_numbers(evidence, header))


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


def program_of_numbers(evidence: NumbersEvidence, header: Recipe) -> Program:
    """The failing operation of a step that produced NaN or infinity.

    Raises:
        NotRecordable: There is no such operation; the text is the reason.
    """
    birth = evidence.birth
    if birth is None:
        raise NotRecordable(evidence.why_not or "no operation of the step is to blame")
    op = birth.op
    if op is None:
        assert birth.leaf is not None
        kind, name = evidence.name_of(birth.leaf)
        what = f"the {kind} `{name}`" if name else f"a {kind}"
        raise NotRecordable(f"the bad value was already in {what}, so no operation made it")
    if op.is_backward and evidence.scope is not None:
        found = _gradient(evidence, op, header)
        if found is not None:
            return found
    captured = evidence.replay_with_values(op)
    if captured is None:
        raise NotRecordable(f"`{op.name}` did not come again in a second replay")
    if any(isinstance(part, float) and math.isnan(part) for part in captured.args):  # `x[0] = torch.nan` in torch 2.15
        raise NotRecordable(f"the bad value was already in the constant that `{op.name}` was given")
    found = _forward(captured, header)
    if found is None:
        raise NotRecordable(f"`{op.name}` alone does not give it")
    return found


def _forward(captured: Captured, header: Recipe) -> Program | None:
    wanted = next((output for output in captured.outputs if badness(output)), None)
    kind = badness(wanted)
    if wanted is None or kind is None:
        return None
    for spelling in spellings(captured.func, captured.args, captured.kwargs):
        try:
            inputs = Inputs()
            line = called(spelling, named(captured, spelling), inputs)
        except NotRecordable:
            continue
        given_inf = any(badness(tensor) == "inf" for tensor in inputs.tensors.values())
        bad = Bad(kind="nan" if kind == "nan" else "inf", of="result", given_inf=given_inf)
        for variant in made(header, inputs, [line], bad).variants():
            found = _with_position(variant, wanted, bad)
            if found is not None:
                return found
    return None


def _with_position(program: Program, wanted: torch.Tensor, bad: Bad) -> Program | None:
    try:
        item = _position(program.run()["result"], wanted)
    except Exception:  # no such function, or it does not take these arguments
        return None
    if item is None:
        return None
    found = program.with_recipe(outcome=msgspec.structs.replace(bad, item=item[0]))
    return found if found.holds() else None


def _position(result: Any, wanted: torch.Tensor) -> tuple[int | None] | None:
    """The position of the bad tensor in a result; (None,) for the result itself."""
    if isinstance(result, torch.Tensor):
        return (None,) if _same_damage(result, wanted) else None
    if isinstance(result, list | tuple):
        for position, item in enumerate(result):
            if isinstance(item, torch.Tensor) and _same_damage(item, wanted):
                return (position,)
    return None


def _same_damage(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    given, wanted = result.detach().cpu(), wanted.detach().cpu()
    return (
        given.shape == wanted.shape
        and torch.equal(given.isnan(), wanted.isnan())
        and torch.equal(given.isinf(), wanted.isinf())
    )


def _gradient(evidence: NumbersEvidence, op: Op, header: Recipe) -> Program | None:
    """The forward operation and `backward` through it, for a bad gradient."""
    assert evidence.scope is not None
    assert evidence.birth is not None
    forward = evidence.scope.forward_of(op)
    if forward is op or forward.is_backward:
        return None
    captured = evidence.replay_with_values(forward)
    if captured is None:
        return None
    for spelling in spellings(captured.func, captured.args, captured.kwargs):
        other: Program | None = None
        for position, output in enumerate(captured.outputs):
            for gradient in _incoming(evidence, op, forward, output):
                found = _differentiated(captured, spelling, (position, gradient), header)
                if found is not None and _kind(found) == evidence.birth.kind:
                    return found
                other = other or found
        if other is not None:
            return other  # infinity can become NaN within the same derivative
    return None


def _kind(program: Program) -> str:
    return program.recipe.outcome.kind if program.recipe.outcome is not None else ""


def _incoming(evidence: NumbersEvidence, op: Op, forward: Op, output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Candidates for the gradient that arrived at the operation: tensors of its shape from earlier in backward."""
    assert evidence.scope is not None
    scope = evidence.scope
    mine = [other for other in scope.ops if other.forward == forward.index and other.node == op.node]
    indices = {other.index for other in mine}
    looked_at = 0
    for other in mine:
        sources = [scope.source(value) for value in other.inputs]
        # Exclude tensors saved by the forward pass, and those that the derivative computed itself.
        arrived = [isinstance(at, int) and at > forward.index and at not in indices for at in sources]
        if not any(arrived) or looked_at >= _MAX_DERIVATIVE_OPS:
            continue
        looked_at += 1
        captured = evidence.replay_with_values(other)
        if captured is None or len(captured.tensors) != len(arrived):
            continue
        for tensor, is_incoming in zip(captured.tensors, arrived, strict=True):
            if is_incoming and tensor.shape == output.shape and badness(tensor) is None:
                yield tensor
    yield torch.ones_like(output)


def _differentiated(
    captured: Captured, spelling: Spelling, incoming: tuple[int, torch.Tensor], header: Recipe
) -> Program | None:
    position, gradient = incoming
    inputs = Inputs()
    try:
        lines = [called(spelling, named(captured, spelling), inputs)]
        inputs.specs = [
            msgspec.structs.replace(spec, grad="leaf") if inputs.tensors[spec.name].is_floating_point() else spec
            for spec in inputs.specs
        ]
        incoming_name = inputs.add(gradient, "incoming", "no")
    except NotRecordable:
        return None
    if len(captured.outputs) > 1 and not spelling.first:
        lines.append(Line(target="operator.getitem", args=(Ref("result"), Plain(position)), result="output"))
    lines.append(Line(target="Tensor.backward", args=(Ref(lines[-1].result), Ref(incoming_name))))
    given_inf = any(badness(tensor) == "inf" for tensor in inputs.tensors.values())
    for found in made(header, inputs, lines, None).variants():
        for spec in inputs.specs:
            if spec.grad == "no":
                continue
            bad = Bad(kind="nan", of=spec.name, gradient=True, given_inf=given_inf)
            kind = found.badness(bad)
            if kind is not None:
                return found.with_recipe(outcome=msgspec.structs.replace(bad, kind=kind))
    return None
