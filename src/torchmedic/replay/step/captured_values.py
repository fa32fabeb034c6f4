"""Operations of a replayed step with their values, which only a second pass keeps: the first one saw too many."""

from __future__ import annotations

from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Captured, Microscope, Op

_MAX_UPSTREAM = 24  # operations before the one that is asked for, captured with it
_MAX_DEPTH = 5


class SecondPass:
    """Replays a step as often as values are asked for that have not been kept yet."""

    def __init__(self, step: Step, first: Microscope, deadline: float) -> None:
        self._step = step
        self._first = first
        self._deadline = deadline
        self._captured: dict[int, Captured | None] = {}
        self.error: BaseException | None = None  # that ended the last pass

    def values_of(self, op: Op) -> Captured | None:
        """An operation with its values. None where a second pass did not go the same way."""
        if op.index not in self._captured:
            wanted = {op.index, *self._upstream(op)} - set(self._captured)
            found = self._capture(frozenset(wanted))
            if self.error is not None and op.index not in found:
                found = self._capture(frozenset(wanted))  # a limit of time was met while others had the processor
            for index in wanted:
                self._captured[index] = found.get(index)
        return self._captured[op.index]

    def _upstream(self, op: Op) -> set[int]:
        """The operations that will be asked for next: what the origin's operands were made of."""
        found: set[int] = set()
        pending = [(op, 0)]
        if op.is_backward:
            pending.append((self._first.forward_of(op), 0))
        while pending and len(found) < _MAX_UPSTREAM:
            here, depth = pending.pop(0)
            found.add(here.index)
            if depth >= _MAX_DEPTH:
                continue
            for value in here.inputs:
                source = self._first.source(value)
                if isinstance(source, int) and source not in found and source < here.index:
                    pending.append((self._first.ops[source], depth + 1))
        return found

    def _capture(self, indices: frozenset[int]) -> dict[int, Captured]:
        scope = Microscope(capture=indices, deadline=self._deadline)
        self.error = self._step.runner.play(scope).error
        return {
            index: kept
            for index in indices
            if index < len(scope.ops)
            and scope.ops[index].name == self._first.ops[index].name
            and (kept := scope.ops[index].captured) is not None
        }
