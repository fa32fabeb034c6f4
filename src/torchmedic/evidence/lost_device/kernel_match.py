"""What the kernel said before it died, held against what the shadow of the step shows."""

from __future__ import annotations

import msgspec

from torchmedic.detect.failures.kernel_asserts import KernelAssertion
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.replay.shadow.cpu_shadow import Seen
from torchmedic.replay.trace.microscope import Spot

# What torch calls its functions, and what the kernels' side calls them.
_NATIVE = {
    "cross_entropy": "nll_loss",
    "__getitem__": "index",
    "__setitem__": "index_put",
    "linear_cross_entropy": "nll_loss",
}


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """How the failure in the shadow fits the failure of the device."""

    certain: bool  # the operation is to blame whatever the values were that had to be invented
    contradicts: bool  # the kernel speaks of an operation of another kind
    facts: tuple[str, ...] = ()


def confirm(lost: LostDevice) -> Confirmation:
    """Whether the operation that failed in the shadow is the one that the device failed at."""
    failed = lost.failed
    if failed is None:
        return Confirmation(certain=False, contradicts=False)
    said = lost.words[0] if lost.words else None
    agrees = launches(said, failed) if said is not None else None
    # An index that the host had is out of range whatever the weights are; a score depends on them.
    known = not failed.index_invented and failed.op not in _OF_NUMBERS
    alone = agrees is True and len(candidates(lost)) == 1
    return Confirmation(
        certain=agrees is not False and (known or alone),
        contradicts=agrees is False,
        facts=() if said is None else (spoken(said),),
    )


_OF_NUMBERS = frozenset({"binary_cross_entropy", "multinomial", "bernoulli", "bernoulli_"})


def candidates(lost: LostDevice) -> list[Seen]:
    """The operations of the step that could have launched the kernel that failed, one per place in the code."""
    if not lost.words:
        return []
    found: dict[Spot, Seen] = {}
    for seen in lost.shadow.seen:
        if seen.spots and launches(lost.words[0], seen):
            found.setdefault(seen.spots[0], seen)
    return list(found.values())


def launches(said: KernelAssertion, seen: Seen) -> bool | None:
    """Whether an operation launches the kernel that failed; None where that is not known."""
    if said.bound is not None and said.bound not in seen.indexed:
        return False
    return said.could_be(_NATIVE.get(seen.op, seen.op))


def spoken(said: KernelAssertion) -> str:
    """The kernel's own words, as evidence."""
    where = said.file.replace("\\", "/").rsplit("/", 1)[-1]
    threads = f" in {said.count} threads" if said.count > 1 else ""
    kernel = f"`{said.kernel}`" if said.kernel else "a kernel"
    place = f" ({where}:{said.line})" if where else ""
    return f"the device's own words: {kernel}{place} found that `{said.condition}` does not hold{threads}"
