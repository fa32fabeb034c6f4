"""Programs for failures of backward that need more than one operation: the fewest lines that fail in the same way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Captured, Microscope, Op
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.replay.trace.saved_tensors import Overwritten, Saved, watch_saved_tensors, writers
from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.aten import Spelling, spellings
from torchmedic.repro.functions import function_lines
from torchmedic.repro.program import Program, called, made, named
from torchmedic.repro.raised import outcome_of
from torchmedic.repro.recipe import Input, Leafhood, Line, Plain, Recipe, Ref

_MAX_REPLAY_SECONDS = 60.0
_OVERWRITTEN = "modified by an inplace operation"
_NO_GRAPH = "does not require grad and does not have a grad_fn"
_FREED = "backward through the graph a second time"


def program(evidence: RaisedEvidence, header: Recipe) -> Program | None:
    """The sub-graph of a failed backward; None if a single call fails.

    Raises:
        NotRecordable: The failure needs more than a few lines.
    """
    if evidence.says(_OVERWRITTEN):
        step = BackwardFailure(evidence).replay()
        found = _overwritten(step, header) if step is not None else None
        if found is None:
            raise NotRecordable("the write and the operation that had saved the tensor could not be replayed")
        return found
    if evidence.says(_FREED):
        raise NotRecordable("no single operation fails: backward went twice through the same graph")
    if evidence.says(_NO_GRAPH):
        step = BackwardFailure(evidence).replay()
        return _cut(step, header) if step is not None else None
    return None


def _overwritten(step: Step, header: Recipe) -> Program | None:
    deadline = time.monotonic() + _MAX_REPLAY_SECONDS
    scope = Microscope(deadline=deadline)
    error = step.runner.play(scope, watch_saved_tensors(scope)).error
    if not isinstance(error, Overwritten):
        return None
    kept = error.saved
    saver = _saver(scope, kept, error.node)
    writes = [op for op in writers(scope, kept) if saver is None or op.index > saver.index]
    if saver is None or not writes:
        return None
    again = Microscope(capture=frozenset({saver.index, writes[0].index}), deadline=deadline)
    step.runner.play(again, watch_saved_tensors(again))  # with the same hooks, which change the operations that run
    captured = [_same(again, op) for op in (saver, writes[0])]
    if captured[0] is None:
        return None
    position = next((at for at, value in enumerate(saver.inputs) if value.storage == kept.storage), None)
    for target in _kinds(kept.tensor, position):
        found = _written(captured[0], captured[1], target, (saver, writes[0]), header)
        if found is not None:
            return found
    return None


def _same(scope: Microscope, op: Op) -> Captured | None:
    other = scope.ops[op.index] if op.index < len(scope.ops) else None
    return other.captured if other is not None and other.name == op.name else None


def _saver(scope: Microscope, kept: Saved, node: str) -> Op | None:
    """The operation whose derivative needs the tensor: it saves a result after it has run, an argument before."""
    near = scope.ops[max(0, kept.after - 1) : kept.after + 3]
    return next((op for op in near if _is_of(node, op) and not op.is_backward), None)


def _is_of(node: str, op: Op) -> bool:
    wanted, given = node.partition("Backward")[0].lower(), op.kind.replace("_", "")
    return bool(wanted) and bool(given) and (given.startswith(wanted) or wanted.startswith(given))


class _Target(NamedTuple):
    """The tensor that is overwritten: the result of the saving operation, or one of its arguments."""

    position: int | None
    grad: Leafhood
    no_grad: bool


def _kinds(saved: torch.Tensor, position: int | None) -> list[_Target]:
    if position is None:
        return [_Target(None, "no", False), _Target(None, "no", True)]
    owner = saved if saved._base is None else saved._base
    is_weight = owner.is_leaf and owner.requires_grad
    found = [_Target(position, "computed", False), _Target(position, "leaf", True)]
    return [*(reversed(found) if is_weight else found), _Target(position, "no", False)]


def _written(
    saver: Captured, writer: Captured | None, target: _Target, ops: tuple[Op, Op], header: Recipe
) -> Program | None:
    for spelling in spellings(saver.func, saver.args, saver.kwargs):
        for write in _writes(writer):
            with contextlib.suppress(Exception):
                found = _three_lines(saver, spelling, write, target, ops, header)
                error = found.error()
                if error is not None and _OVERWRITTEN in str(error):
                    return found.with_recipe(outcome=outcome_of(error))
    return None


def _writes(writer: Captured | None) -> Iterator[Spelling | None]:
    if writer is not None:
        yield from spellings(writer.func, writer.args, writer.kwargs)
    yield None


def _three_lines(
    saver: Captured, spelling: Spelling, write: Spelling | None, target: _Target, ops: tuple[Op, Op], header: Recipe
) -> Program:
    """A program of three lines: save, write, backward."""
    inputs = Inputs()
    line = msgspec.structs.replace(
        called(spelling, named(saver, spelling), inputs), note=_place("saved for backward", ops[0])
    )
    changed = "result"
    if target.position is not None:
        tensor = saver.tensors[target.position]
        changed = inputs.add(tensor)  # already added: returns its name
    inputs.specs = [_with_grad(spec, inputs, target.grad if spec.name == changed else "leaf") for spec in inputs.specs]
    if write is None:
        second = Line(target="Tensor.add_", args=(Ref(changed), Plain(1)))
    else:
        rest = tuple(inputs.argument(value, "value") for value in write.args[1:])
        named_rest = {key: inputs.argument(value, key) for key, value in write.kwargs.items()}
        second = Line(target=write.target, args=(Ref(changed), *rest), kwargs=named_rest)
    second = msgspec.structs.replace(second, no_grad=target.no_grad, note=_place("written to in place", ops[1]))
    return made(header, inputs, [line, second, Line(target="sum_backward", args=(Ref("result"),))], None)


def _with_grad(spec: Input, inputs: Inputs, grad: Leafhood) -> Input:
    differentiable = inputs.tensors[spec.name].is_floating_point()
    return msgspec.structs.replace(spec, grad=grad if differentiable else "no")


def _place(text: str, op: Op) -> str:
    if op.spot is None:
        return text
    where = op.spot.location("origin")
    return f"{text}: {where.file}:{where.line}"


class _Calls(Provenance):
    """Records the calls with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.raw: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.raw.setdefault(len(self.calls) - 1, (func, args, kwargs or {}))
        return result


def _cut(step: Step, header: Recipe) -> Program | None:
    calls = _Calls()
    played = step.runner.play(calls, backward=False)
    if played.error is not None or not played.roots:
        return None
    cuts = calls.cuts_behind(played.roots[-1])
    if not cuts:
        return None
    number = next(at for at, call in enumerate(calls.calls) if call is cuts[0])
    function, args, kwargs = calls.raw[number]
    if cuts[0].name == "data":
        function, args, kwargs = torch.Tensor.detach, args[:1], {}
    with contextlib.suppress(Exception):
        inputs = Inputs()
        lines = function_lines(
            function, [(value, "") for value in args], {key: (value, key) for key, value in kwargs.items()}, inputs
        )
        inputs.specs = [_with_grad(spec, inputs, "leaf" if spec.grad != "no" else "no") for spec in inputs.specs]
        spot = cuts[0].spot
        place = spot.location("origin") if spot is not None else None
        note = f"the graph is cut: {place.file}:{place.line}" if place is not None else "the graph is cut"
        lines[-1] = msgspec.structs.replace(lines[-1], no_grad=not cuts[0].grad_enabled, note=note)
        found = made(header, inputs, [*lines, Line(target="sum_backward", args=(Ref("result"),))], None)
        error = found.error()
        if error is not None and _NO_GRAPH in str(error):
            return found.with_recipe(outcome=outcome_of(error))
    return None
