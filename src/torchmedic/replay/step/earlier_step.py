"""A step that is over, replayed from what was kept of it: its batch, its random state, its variables.

The frame of the loop is still there, or one of the same function, with the variables of a later step. Those that held
data are set back; where that cannot be done for one of them, the frame is left for the one around it, whose statements
make the data from the batch.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from torchmedic.observe.context import StepContext, StepView
from torchmedic.observe.numbers.func_losses import is_trained
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.kept_values import GONE, given_back
from torchmedic.observe.step.step_notes import line_of
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.step.batch_of_then import data_of, may_be_part, place_of, stand_ins, twins
from torchmedic.replay.step.result import ReplayResult, start_of
from torchmedic.replay.step.reused_results import draws_from_iterator, reusable_result
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.step import Step, earlier
from torchmedic.source.assignments import names_read, names_written, read_first
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.segment.names import names_changed, names_renewed

BATCH = "__torchmedic_batch__"  # in the variables of a replay: the present batch with the data of then
_DATA = (int, float, str, list, tuple, dict)


def earlier_step(
    past: KeptBackward, frame: FrameType | None, agent: StepContext, *, to_update: bool = False
) -> tuple[Step, StepView]:
    """An earlier step, ready to be replayed, and the context to read it by.

    Args:
        past: What was kept of it.
        frame: A live frame, below those that run the step.
        agent: The process as it is now.
        to_update: Whether the step goes on to the update that followed, and not only to the backward call.
    """
    view = StepView(agent, notes=past, batches=past.host_batch)
    why = CannotCut("the frames of the step before are gone")
    end = past.ends[-1] if to_update and past.ends and past.ends[-1].code is not None else None
    whole = to_update and past.by_hand
    codes = [point.code for point in past.points]
    # Where the frame that called the update is gone, the statement of the frame around it is run as a whole.
    points = past.points[codes.index(end.code) :] if end is not None and end.code in codes else past.points
    for point in points:
        ends_here = end is not None and point.code is end.code
        live = next((each for each in _outwards(frame) if each.f_code is point.code), None)
        if live is None:
            continue
        free = point.code.co_freevars  # of a closure: variables of the functions around it
        outer = {name: each.values[name] for each in past.points for name in free if name in each.values}
        values = {**outer, **point.values}
        at = line_of(point.code, point.lasti)
        kind = functools.partial(EarlierStepRunner, values=values, at=at, present=agent.batches.whole)
        try:
            line = None if point.forward_lasti is None else line_of(point.code, point.forward_lasti)
            lasti = end.lasti if end is not None and ends_here else point.lasti
            step = earlier(live, lasti, line, view, kind, include_failing=not ends_here, whole_turn=whole)
        except CannotCut as reason:
            why = reason
            continue
        assert isinstance(step.runner, EarlierStepRunner)
        step.runner.is_one_call = end is not None and not ends_here
        lost = step.runner.lost
        if whole:  # what follows the backward call may count and print; whether the loss repeats is looked at
            lost = {name for name in lost if not isinstance(live.f_locals.get(name), int | float | str)}
        if not lost or step.runner.freeze_readers(lost):
            return step, view
        why = CannotCut(f"`{sorted(lost)[0]}` of the step before is gone")
    raise why


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class EarlierStepRunner(Runner):
    """Replays a segment with the data of an earlier step."""

    def __init__(self, *args: Any, values: dict[str, Any], at: int, present: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_one_call = False  # the last statement runs all of the step
        self.takes_state_of_forward = False  # the first call of a module begins with the random state of then
        self._at = at  # the line of the frame when the variables were kept
        self._past = self._batch
        self._present = present
        self._calls_before = 0  # of modules, when a replay began
        self._then = {name: value for name, kept in values.items() if (value := given_back(kept)) is not GONE}

    def play(self, *contexts: AbstractContextManager[Any], **options: Any) -> ReplayResult:
        """Run the segment. Whatever object holds the batch of the present step, it holds the data of then."""
        with data_of(self._past, self._present):
            return super().play(*contexts, **options)

    @property
    def lost(self) -> set[str]:
        """Variables with data of the step that can be set back by nothing that was kept."""
        changed = names_changed(self.segment)
        known = {**self._frame.f_globals, **self._locals}
        namespace, mapped = self._set_back()
        carried = self._notes.carried if self._notes.carried_frame == id(self._frame) else {}
        renewed = names_renewed(self._frame, self.segment.lines[1])
        code = self._frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        rest = code.co_varnames[len(given) : len(given) + 2]  # `*args` and `**kwargs`, which may be empty
        held = {id(tensor) for tensor, _ in stand_ins(self._past, self._present)}
        lost = set()
        for name in read_first(self.segment.statements) & renewed & self._locals.keys():
            value = namespace.get(name)
            tensors = tensors_in(value)
            if name in given and any(tensor.grad_fn is not None for tensor in tensors):
                lost.add(name)  # the forward pass was made further outside, with the weights of then
            if name in mapped or name in carried or name in self._begun(changed):
                continue
            if tensors and held.issuperset(map(id, tensors)):
                continue  # a container of a framework's own around the batch, which holds the data of then
            is_data = isinstance(value, _DATA) or hasattr(type(value), "__array_interface__")
            is_data &= not (name in rest and isinstance(value, tuple | dict) and not value)
            if any(not (tensor.requires_grad or is_trained(tensor)) for tensor in tensors) or (not tensors and is_data):
                lost.add(name)  # what is trained is not data, and is set back by other means
        for statement in self.segment.statements[: -1 if self.is_one_call else None]:
            if draws_from_iterator(statement, namespace) or reusable_result(statement, self.segment.statements, known):
                lost |= {name for name in names_written(statement) if name not in self._then and name in known}
        return lost

    def freeze_data(self) -> bool:
        """Take over the data of the step in place of making it again; False where none of it was kept."""
        made = self.play(keep_graphs=False, backward=False).made_data
        last = self._last_bound()
        self.frozen = {
            start_of(statement)
            for statement in self.segment.statements
            if start_of(statement) in made
            # What was kept of a variable is what the last statement that binds it gave.
            and all(name in self._then and last[name] == start_of(statement) for name in _bound(statement))
        }
        return bool(self.frozen)

    def freeze_readers(self, lost: set[str]) -> bool:
        """Do without some variables: take over what was made of them. False where that was not kept."""
        frozen = set()
        last = self._last_bound()
        unknown = set(lost)  # names that do not hold what the next statement would read
        for statement in self.segment.statements:
            written = _bound(statement)
            if unknown.isdisjoint(names_read(statement)) and not (written and written <= lost):
                unknown -= written
                continue
            if not written <= self._then.keys() | lost or not written:
                return False
            if any(tensor.requires_grad for name in written for tensor in tensors_in(self._then.get(name))):
                return False  # computed with weights
            frozen.add(start_of(statement))
            # What was kept of a variable is what the last statement that binds it gave.
            later = {name for name in written if last[name] != start_of(statement)}
            unknown = (unknown - written) | later | (written & lost)
        self.frozen = frozen
        return True

    def _last_bound(self) -> dict[str, tuple[int, int]]:
        """The last statement that binds each name, by its start."""
        return {name: start_of(statement) for statement in self.segment.statements for name in _bound(statement)}

    def _frozen_results(self, statement: ast.stmt) -> dict[str, Any]:
        return {name: self._then[name] for name in names_written(statement) if name in self._then}

    def _begun(self, changed: set[str]) -> dict[str, Any]:
        """The variables as the step began with them: those that it does not change, and its counters."""
        found = {name: value for name, value in self._then.items() if name not in changed}
        for name in changed & self._then.keys():
            added, value = _added(self.segment.statements, name, self._at), self._then[name]
            if added == 0 or (added is not None and type(value) in (int, float)):
                found[name] = value - added if added else value
        return found

    def _count_call(self, module: Any, args: Any) -> None:
        rng = self._notes.forward_rng if isinstance(self._notes, KeptBackward) else None
        is_known = self.frozen or self.takes_state_of_forward
        if is_known and rng is not None and self._module_calls == self._calls_before:
            torch.set_rng_state(rng)
        super()._count_call(module, args)

    def _namespace(self) -> dict[str, Any]:
        self._calls_before = self._module_calls
        return self._set_back()[0]

    @property
    def _known(self) -> dict[str, Any]:
        return {**super()._known, **self._then}

    def _set_back(self) -> tuple[dict[str, Any], set[str]]:
        """The variables, and the names of those that the batch gave."""
        self._batch = self._present
        try:
            namespace = super()._namespace()
        finally:
            self._batch = self._past
        changed = names_changed(self.segment)
        namespace.update(self._begun(changed))
        others = dict(twins(self._present, self._past)) if self._past is not None else {}
        places = {name: place_of(value) for name, value in namespace.items() if may_be_part(value)}
        mapped = {name for name, place in places.items() if place in others}
        for name in mapped:
            namespace[name] = others[places[name]]
        namespace[BATCH] = self._present
        # What the batch of then gave is the batch of then.
        parts = dict(twins(self._past, self._past)) if self._past is not None else {}
        mapped |= {name for name, place in places.items() if place in parts}
        return namespace, mapped


def _added(statements: list[ast.stmt], name: str, line: int) -> float | None:
    """What `name += 1` and the like have added before a line; None where the name is changed in another way."""
    total = 0
    for statement in statements:
        # A branch that has set a name, as `if at == end: state = None`, does so again.
        end = statement.lineno if hasattr(statement, "body") else statement.end_lineno or statement.lineno
        if end >= line or isinstance(statement, ast.If) or name not in names_written(statement):
            continue
        match statement:
            case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=int() as added)):
                total += added
            case _:
                return None
    return total


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement leaves bound; the variables of a comprehension are its own."""
    inner = {
        name
        for node in ast.walk(statement)
        if isinstance(node, ast.comprehension)
        for name in names_written(node.target)
    }
    return set(names_written(statement)) - inner
