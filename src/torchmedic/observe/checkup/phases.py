"""When a run is to be looked at anew: another phase of the training has begun, or a long run has gone on for long."""

from __future__ import annotations

from typing import Any

from torchmedic.observe.step.tensors import parameters_of

_MAX_PHASES = 4  # changes that are looked at
_LATE_LOOKS = (32, 64, 256, 1024, 4096, 16_384)  # steps; asked every 32 steps
_YOUNG_STEPS = 8  # in which optimizers appear that were there from the start


class Phases:
    """Which parameters are trained, and how many late looks there were."""

    def __init__(self) -> None:
        self.late_looks = 0
        self._trained: dict[int, int] = {}  # by optimizer: how many of its parameters are trained
        self._known: set[int] = set()  # identities of all that was ever trained
        self._changes = 0

    def knows(self, optimizer: Any) -> bool:
        return id(optimizer) in self._trained

    def begun(self, optimizer: Any, step: int) -> set[int] | None:
        """The identities of parameters that were not trained before, if a phase has begun; else None.

        A phase begins with another optimizer, or when other parameters are trained.
        """
        trained = {id(tensor) for tensor in parameters_of(optimizer) if tensor.requires_grad}
        before, self._trained[id(optimizer)] = self._trained.get(id(optimizer)), len(trained)
        thawed, self._known = trained - self._known, self._known | trained
        if before == len(trained) or step < _YOUNG_STEPS or self._changes >= _MAX_PHASES:
            return None
        self._changes += 1
        return thawed

    def is_late_look_due(self, step: int) -> bool:
        if self.late_looks >= len(_LATE_LOOKS) or step < _LATE_LOOKS[self.late_looks]:
            return False
        self.late_looks += 1
        return True
