"""Whom the watch over finite numbers turns to."""

from __future__ import annotations

from types import FrameType
from typing import Any, Protocol


class Examiner(Protocol):
    """Whoever finds the origin of a bad number."""

    def examine(self, optimizer: Any, frame: FrameType, what: str, at: str) -> Any:
        """Look into it now; the finding is kept until it is known to matter."""

    def publish(self, finding: Any) -> None:
        """It matters."""

    def device_died(self, error: BaseException, frame: FrameType) -> None:
        """A device has failed, which was seen when a loss was to be read."""

    def usual_step(self) -> tuple[int, float]:
        """The number of the step, and how many seconds one takes."""

    def mark(self, what: str) -> None:
        """Have the device say when it has come this far."""


class Optimizers(Protocol):
    """Whoever knows the optimizers."""

    optimizer_count: int

    @property
    def optimizers(self) -> list[Any]: ...
