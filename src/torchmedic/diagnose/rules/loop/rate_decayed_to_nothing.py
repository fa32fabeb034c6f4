"""The learning rate fell below 0, or fell to next to nothing early, so that most updates change nothing.

What: the learning rate is 0, or less than a ten-thousandth of what it was, and has been for more than half of the run;
or the learning rate is negative.

Why: a schedule that was meant to move once per epoch moves with every batch; its length was given in epochs or for a
shorter run; or a factor is applied far more often than it was meant to be. An update is the learning rate times the
gradient, so the weights stay as they are. The loss stands still, and no error is raised. A schedule that goes on after
its end may pass 0: with a negative rate every update raises the loss.

A state of an optimizer that is loaded brings its learning rate along. `LambdaLR` multiplies the rate with what its
function returns. `ReduceLROnPlateau` with `mode="max"` takes a falling loss for a plateau, and with `mode="min"`, its
default, a rising accuracy. A warm-up that is longer than the run never comes to its end.

Cure: call `scheduler.step()` once per epoch, or give the schedule its length in updates:
`epochs * len(loader)`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import RateDecayed
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM625", "rate-decayed-to-nothing", RateDecayed)
def check(evidence: LoopEvidence, incident: RateDecayed) -> Draft | None:
    if incident.reason in ("warming", "per epoch"):
        return _still_rising(evidence, incident)
    if incident.reason:
        return _by_mistake(evidence, incident)
    schedule = f"`{incident.schedule}`" if incident.schedule else "the loop"
    draft = check.draft(evidence, "proven" if incident.is_per_update or not incident.schedule else "likely")
    is_negative = incident.rate < 0
    draft.message = (
        f"the learning rate is {'negative' if is_negative else 'next to nothing'} since step {incident.since}: it fell "
        f"from {incident.first:.1e} to {incident.rate:.1e}"
    )
    if is_negative:
        draft.cause = f"{schedule} has lowered it below 0, and every update with a negative rate raises the loss"
    elif incident.is_per_update:
        draft.cause = f"{schedule} has lowered it with every update"
    else:
        draft.cause = f"{schedule} has lowered it long before the run was over"
    label = "called after every update" if incident.is_per_update else "sets the learning rate"
    draft.at(
        evidence.at("cause", incident.cause, label, "step"),
        evidence.at("origin", incident.built, "how the learning rate falls")
        if incident.built != incident.cause
        else None,
        evidence.at("surfaced", incident.update, "goes uphill" if is_negative else "changes next to nothing", "step"),
    )
    made = f"{count(incident.updates, 'update')} of {incident.since + incident.updates} were made with "
    if is_negative:
        draft.because(f"{made}a negative learning rate")
    else:
        draft.because(f"{made}at most {incident.rate / incident.first:.0e} of the largest learning rate")
    draft.help(
        "move the schedule once per epoch, or give it its length in updates"
        if incident.schedule
        else "lower the learning rate more slowly, or not below a bound",
        safety="changes-training",
    )
    return draft.rated("warning")


def _by_mistake(evidence: LoopEvidence, incident: RateDecayed) -> Draft:
    """The rate is small for a reason other than the course of the schedule."""
    draft = check.draft(evidence, "likely" if incident.reason in ("falling", "rising") else "proven")
    rate, meant = f"{incident.rate:.1e}", f"{incident.first:.1e}"
    if incident.reason == "loaded":
        draft.message = f"the learning rate is {rate}, and not {meant}: it came with the state that was loaded"
        draft.cause = f"the state of the optimizer holds the learning rate at the end of another run, {rate}"
        label, cure = f"sets the learning rate to {rate}", "set the learning rate after the state is loaded"
    elif incident.reason == "absolute":
        draft.message = f"the learning rate is {rate}, and not {meant}: it is multiplied with itself"
        draft.cause = (
            f"`LambdaLR` multiplies the learning rate with what its function returns, and that is {meant} itself"
        )
        label, cure = f"returns {meant}, the learning rate", "return a factor: 1.0 for the learning rate as it is"
    else:
        falls = incident.reason == "falling"
        mode, wanted, given = ("max", "rise", "falls") if falls else ("min", "fall", "rises")
        draft.message = f"the learning rate fell to {rate}: the schedule takes {incident.reason} numbers for a plateau"
        number = "a number" if falls else "a share, such as an accuracy,"
        waits = f'`ReduceLROnPlateau` with mode="{mode}" waits for a number to {wanted}'
        draft.cause = f"{waits}, and it is given {number} that {given}"
        label, cure = f'mode="{mode}"', 'use mode="min" for a loss' if falls else 'use mode="max" for an accuracy'
    draft.at(evidence.at("cause", incident.cause, label))
    draft.at(evidence.at("surfaced", incident.update, "changes next to nothing", "step"))
    draft.because(f"{count(incident.updates, 'update')} were made with a small learning rate")
    draft.help(cure, safety="changes-training")
    return draft.rated("warning")


def _still_rising(evidence: LoopEvidence, incident: RateDecayed) -> Draft:
    """The run is over, and the rate never came near what it was meant to be."""
    draft = check.draft(evidence, "likely")
    rate, meant, updates = f"{incident.rate:.1e}", f"{incident.first:.1e}", count(incident.updates, "update")
    draft.message = f"the learning rate never came near {meant}: it was {rate} after {incident.step} of {updates}"
    if incident.reason == "per epoch":
        draft.cause = f"`{incident.schedule}` is as long as the run has updates, and it has moved once per epoch"
        cure = "have the schedule move after every update"
    else:
        draft.cause = "the learning rate rises so slowly that the run ends in the warm-up"
        cure = "make the warm-up shorter than the run: a few per cent of its updates"
    is_moved = incident.built is not None and incident.built != incident.cause
    label, rises = "called once per epoch", "how the learning rate rises"
    draft.at(
        evidence.at("cause", incident.cause, label, "step")
        if is_moved
        else evidence.at("cause", incident.cause, rises),
        evidence.at("origin", incident.built, rises) if is_moved else None,
        evidence.at("surfaced", incident.update, "makes small updates", "step"),
    )
    draft.because(
        f"the rate has only risen, and is {incident.rate / incident.first:.1%} of {meant}",
        "" if incident.reason == "per epoch" else "the loss is where it was at first",
    )
    draft.help(cure, safety="changes-training")
    return draft.rated("warning")
