"""The peak of a step that some code takes, without taking it: the way in for those who have no failed step at hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchmedic.evidence.memory.fake.fake_step import counted_by, device_left_alone, untouched
from torchmedic.evidence.memory.fake.optimizer_updates import stepping_on_fakes
from torchmedic.evidence.memory.fake.peak import Counting, Fakes, LiveBytes


def peak_of(
    step: Callable[[], Any],
    *,
    modules: Sequence[torch.nn.Module],
    optimizers: Iterable[Any] = (),
    wanted: Callable[[torch.device], bool] | None = None,
    seconds: float = 30.0,
) -> dict[str, int]:
    """The most bytes of each phase of a step: forward, backward, and the steps of these optimizers if it calls them.

    Nothing is computed and no memory is taken: weights, gradients, states and random numbers are as before.

    Args:
        step: Takes it.
        modules: The roots of what it runs.
        optimizers: Those that it may step.
        wanted: Whether a device counts; all do by default.
        seconds: To give up after.

    Raises:
        Exception: Fakes could not follow the step.
    """
    optimizers = list(optimizers)
    fakes = Fakes()
    names = {id(module): name for root in modules for name, module in root.named_modules()}
    ledger = Counting(fakes, names, time.monotonic() + seconds, LiveBytes(wanted))
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(modules, (), optimizers))
        stack.enter_context(device_left_alone())
        for optimizer in optimizers:
            stack.enter_context(stepping_on_fakes(optimizer, ledger))
        stack.enter_context(counted_by(ledger, fakes.mode, modules))
        step()
        return ledger.live.by_phase
