"""Recoveries from an out-of-memory, as lines of kind `recovery` and `recovery-refused` in events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

RecoveryPhase = Literal["forward", "backward", "update"]
Means = Literal["retry", "parts", "activations", "optimizer", "recompute", "kernel", "split", "random split"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PHASES: dict[RecoveryPhase, str] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "update of the weights",
}
_FEWER_ACTIVATIONS = "a smaller micro-batch with gradient accumulation, or torch.utils.checkpoint on the largest blocks"
_ADVICE: dict[Means, str] = {
    "retry": "free results of earlier steps sooner; on CUDA also PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "parts": "a loss that takes the rows of its logits in parts (chunked or fused cross entropy)",
    "activations": _FEWER_ACTIVATIONS,
    "recompute": _FEWER_ACTIVATIONS,
    "optimizer": "an optimizer with less state, or foreach=False",
    "kernel": "a smaller micro-batch with gradient accumulation",
    "split": _FEWER_ACTIVATIONS,
    "random split": _FEWER_ACTIVATIONS,
}
_RESULTS: dict[Means, str] = {
    "kernel": "the results are the same up to rounding",
    "split": "the results are the same up to rounding",
    "random split": "the random numbers are others, as with another seed",
}


class Recovery(msgspec.Struct, frozen=True, kw_only=True, tag="recovery", tag_field="kind"):
    """A call that ran out of memory and was repeated with success.

    `bytes` were parked outside of the memory that was short; `seconds` is what the recovery took. With `is_avoided` the
    memory was not short yet, but would have been.
    """

    step: int
    phase: RecoveryPhase
    means: Means
    call: str = ""
    bytes: int = 0
    seconds: float = 0.0
    is_avoided: bool = False


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="recovery-refused", tag_field="kind"):
    """An out-of-memory that was passed on to the script, and why."""

    step: int
    phase: RecoveryPhase
    reason: str


def summary(recoveries: Iterable[Recovery], refusals: Iterable[Refusal]) -> list[str]:
    """What is told at the end of a run: a line for each kind of recovery, and the last refusal."""
    kinds: dict[tuple[bool, RecoveryPhase, Means], list[Recovery]] = {}
    for each in recoveries:
        kinds.setdefault((each.is_avoided, each.phase, each.means), []).append(each)
    lines = []
    for (is_avoided, phase, means), found in kinds.items():
        begin = "avoided an out-of-memory" if is_avoided else "recovered from out-of-memory"
        times = "once" if len(found) == 1 else f"{len(found)} times"
        seconds = sum(each.seconds for each in found)
        lines.append(
            f"{begin} in the {_PHASES[phase]} {times}, first at step {found[0].step}: "
            f"{_done(means, found)}, {seconds:.1f} s in all, {_RESULTS.get(means, 'the results are the same')}; "
            f"to make it permanent: {_ADVICE[means]}"
        )
    last = list(refusals)[-1:]
    return lines + [f"not recovered from out-of-memory in the {_PHASES[each.phase]}: {each.reason}" for each in last]


def _done(means: Means, found: Sequence[Recovery]) -> str:
    nbytes = max(each.bytes for each in found)
    if means in ("split", "random split"):
        calls = ", ".join(dict.fromkeys(each.call for each in found if each.call))
        return f"calls of {calls} were made in parts of the batch and computed again for backward"
    if means == "retry":
        return "unused memory was freed and the call repeated"
    if means == "parts":
        return "the loss was computed in parts"
    if means == "kernel":
        return "there was no room for the workspace of a convolution, and torch took another kernel"
    if means == "recompute":
        parked = f", {_size(nbytes)} of its saved activations were parked" if nbytes else ""
        return f"the step was computed again{parked}"
    return f"{_size(nbytes)} of {'saved activations' if means == 'activations' else 'optimizer memory'} were parked"


def _size(nbytes: float) -> str:
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.3g} {_UNITS[unit]}"
