"""Gradients that the loss of another optimizer leaves in the weights, and that nobody clears before they are used.

The loss of a generator goes through the discriminator. Its backward gives both of them gradients, and those of the
discriminator are a by-product. A shared encoder, which collects the gradients of several losses, is told apart by its
place: the weights of the other optimizer are nearer to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.detect.loop.incident import GradientsOfAnotherLoss, LoopIncident
from torchmedic.detect.loop.intervals import Interval, intervals
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place

_MIN_UPDATES = 4


def find(habits: Habits) -> Iterator[LoopIncident]:
    if len(habits.optimizers) < 2:
        return
    known = {number: intervals(habits.events, number) for number in habits.optimizers}
    reached = {number: {id(act) for part in parts for act in part.of("backward")} for number, parts in known.items()}
    for number, parts in known.items():
        mixed = [part for part in parts if part.of("step")]
        found = [_left_over(habits, number, part, reached) for part in mixed]
        last = mixed[-1].step if mixed else None
        if len(found) <= _MIN_UPDATES or last is None or found[-1] is None or set(found[1:]) != {found[-1]}:
            continue  # the first time, there was nothing to be cleared yet
        cleared, other, own = found[-1]
        yield GradientsOfAnotherLoss(
            step=last.step,
            cause=cleared if cleared is not None else own,
            cleared=cleared,
            other=other,
            own=own,
            update=last.place,
            updates=len(found),
        )


def _left_over(
    habits: Habits, number: int, part: Interval, reached: dict[int, set[int]]
) -> tuple[Place | None, Place, Place] | None:
    """Where the gradients are cleared, the backward that leaves some, and the own one; None where it may be meant."""
    zeros = part.of("zero")
    kept = part.acts[part.acts.index(zeros[-1]) + 1 :] if zeros else part.acts
    backwards, steps = ([act for act in kept if act.kind == kind] for kind in ("backward", "step"))
    if part.touched or part.skipped or len(backwards) != 2 or len(steps) != 1 or part.of("step") != steps:
        return None
    other, own = backwards
    whose = steps[0].who
    is_between = kept.index(other) < kept.index(steps[0]) < kept.index(own)
    owners = [{each for each, known in reached.items() if id(act) in known} for act in backwards]
    if not is_between or other.site == own.site or owners != [{number, whose}, {number}] or other.fact.inside_step:
        return None
    if {event.fact.nearest for event in habits.events if event.site == other.site and event.kind == "backward"} - {
        0
    } != {number}:
        return None
    return zeros[-1].place if zeros and zeros[-1].place.line else None, other.place, own.place
