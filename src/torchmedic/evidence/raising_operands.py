"""What the call that raised was given, where no variable holds it: a replay of the step catches the call."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchmedic.replay.isolation.sandbox import ReplayTooLong
from torchmedic.replay.step.step import Step
from torchmedic.source.lookup.failing_call import UNKNOWN, Call

_MAX_REPLAY_SECONDS = 30.0


class Catcher(TorchFunctionMode):
    """Records the innermost call of torch's Python API that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast = ""
        self._deadline = time.monotonic() + _MAX_REPLAY_SECONDS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if time.monotonic() > self._deadline:
            raise ReplayTooLong
        try:
            return func(*args, **kwargs)
        except Exception:
            self.caught = (func, args, kwargs)
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    self.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            raise


def replay_operands(step: Step, error: BaseException, call: Call) -> bool:
    """Replay a step for the operands of a call that are not known; whether all of them are known now."""
    catcher = Catcher()
    again = step.runner.play(catcher).error
    if again is None or catcher.caught is None or (type(again), str(again)) != (type(error), str(error)):
        return False
    _, args, kwargs = catcher.caught
    positional = [argument for argument in call.arguments if not argument.name]
    if not call.whole or len(positional) != len(args):
        return False
    pairs = [*zip(positional, args, strict=True)]
    pairs += [(argument, kwargs.get(argument.name, UNKNOWN)) for argument in call.arguments if argument.name]
    for argument, value in pairs:
        known = argument.tensor
        if known is not None and not (isinstance(value, torch.Tensor) and value.shape == known.shape):
            return False  # another call than the one that was read
    for argument, value in pairs:
        if argument.value is UNKNOWN:
            argument.value = value
    return call.is_known
