"""The failing step on fake tensors, up to the operation that had no memory; or the reason why not."""

from __future__ import annotations

import contextlib

import torch

from torchmedic.evidence.memory.by_line import Line, summed
from torchmedic.evidence.memory.fake.fake_step import FakeRunner
from torchmedic.evidence.memory.fake.ledger import ByteLedger
from torchmedic.replay.isolation.sandbox import ReplayTooLong
from torchmedic.replay.step.step import Step


class NotPlayed(Exception):
    """The step cannot be played on fakes."""

    def __init__(self, reason: str, *, is_long: bool = False) -> None:
        super().__init__(reason)
        self.is_long = is_long  # another try would take too long as well


def play(
    step: Step, device: torch.device | None, *, stop: int | None, asked: int | None, line: tuple[str, int] | None
) -> tuple[ByteLedger, torch.device | None]:
    """Play the failed step on fake tensors; also returns the default device of new tensors, if that matters.

    Args:
        step: What failed.
        device: The one that has no memory. The step may have run under `with torch.device(...)`, which is over now.
        stop: After how many nodes it failed; None where that was in backward.
        asked: The bytes that it asked for.
        line: The user's file and line.

    Raises:
        NotPlayed: With the reason.
    """
    error: BaseException | None = None
    for default in (None, device):
        if error is not None and (default is None or not _is_mismatch(error)):
            break
        with default or contextlib.nullcontext():
            try:
                ledger, error = FakeRunner.of(step.runner).play_fake(stop=stop, asked=asked, line=line)
            except Exception as failure:
                error = failure
        if error is None:
            return ledger, default
    assert error is not None
    raise NotPlayed(_reason(error), is_long=isinstance(error, ReplayTooLong))


def made_again(step: Step, *, asked: int, line: tuple[str, int]) -> list[Line]:
    """What a step has made and still has when its backward, called at some line, asks for so much.

    For activations that a checkpoint computes again, which are gone once the exception has unwound.
    """
    try:
        ledger, error = FakeRunner.of(step.runner).play_fake(asked=asked, line=line, backward=True)
    except Exception:
        return []
    found = summed(ledger.at_failure) if error is None else []
    return [each for each in found if each.spot is not None and (each.spot.file, each.spot.line) != line]


def _is_mismatch(error: BaseException) -> bool:
    return "on the same device" in str(error) or "found two different devices" in str(error)  # torch 2.6


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return "the step reads values that fake tensors do not have"
    return f"{kind}: {str(error).splitlines()[0][:80]}" if str(error) else kind
