"""Training diverged: the loss grew from step to step until it overflowed.

What: no single operation is wrong. Every update made the loss larger, until a number exceeded the range of its dtype.

Why: the learning rate is too high for this model and this data; unnormalised inputs, a missing warm-up, or gradients
that are not clipped have the same effect. In a job of several ranks, gradients that are added by `all_reduce` and not
divided make each update as many times larger as there are ranks. Weights that are added grow with each exchange.

Cure: use a smaller learning rate, a warm-up, gradient clipping, normalised inputs. The last steps could not be run
again, or nothing that was tried turned the course of the loss, so none of these is called proven.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import LossGrowth, WeightGrowth, grown_weights, growth, rate_location
from torchmedic.diagnose.rules.numbers._huge_weights import huge_weights
from torchmedic.diagnose.rules.numbers._summed_gradients import summed
from torchmedic.diagnose.rules.numbers._wording import noticed
from torchmedic.diagnose.words.death import line_location
from torchmedic.evidence.last_steps import update_by_hand
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.trace.values import number


@rule("TM222", "diverging-training")
def check(evidence: NumbersEvidence) -> Draft | None:
    incident = evidence.incident
    found = growth(evidence) if incident.quantity != "growth" else None
    grown = grown_weights(evidence) if found is None else None
    if incident.quantity == "rate":
        return None
    if found is None and grown is None:
        return _made_huge(evidence) if incident.quantity != "growth" else None
    optimizer = incident.stepping or (incident.optimizers[0] if len(incident.optimizers) == 1 else None)
    draft = check.draft(evidence, "likely", *_described(found, grown))
    rates = sorted({group["lr"] for group in optimizer.param_groups}) if optimizer is not None else []
    rate = ", ".join(number(float(value)) for value in rates[:3])
    added = summed(evidence)
    if added is not None:
        label = f"adds the {added.of} of {added.ranks} ranks, and nothing divides the sum"
        draft.at(line_location("cause", added.line.file, added.line.line, label))
        result = "the gradient of each update is" if added.of == "gradients" else "after each exchange the weights are"
        draft.because(f"{result} {added.ranks} times the mean of the {added.of} of all ranks")
        draft.help("divide the sum by the number of ranks: `dist.get_world_size()`", safety="changes-training")
    if optimizer is not None:
        found_rate = rate_location(evidence, optimizer, float(rates[-1]))
        is_second = added is not None and found_rate is not None
        draft.at(replace(found_rate, role="origin") if is_second and found_rate is not None else found_rate)
    elif not incident.optimizers and evidence.frames:
        draft.at(update_by_hand(evidence.frames[-1].live, evidence.agent, "the weights are updated here"))
    spot = evidence.spot
    draft.mark(spot, "surfaced", "this is where it overflowed")
    draft.mark(evidence.noticed, "surfaced" if spot or draft.has_place else "cause", "noticed here")
    last = ", ".join(number(value) for value in found.last) if found is not None else ""
    draft.because(f"loss of the last steps: {last}, then not finite" if last else "")
    weights = [
        tensor.detach().abs().max().item()
        for tensor in parameters_of(*incident.optimizers)
        if tensor.numel() and bool(torch.isfinite(tensor.detach()).all())
    ]
    draft.because(f"the largest weight is {number(max(weights))}" if weights else "")
    why = evidence.why_no_divergence
    no_change = "no change that was tried turns the course of the loss"
    draft.because(f"the updates could not be run again: {why}" if why else no_change)
    if rates:
        draft.help(f"lower the learning rate (it is {rate}), or warm it up", safety="changes-training")
    elif not incident.optimizers:
        draft.help("lower the step size of the updates", safety="changes-training")
    draft.help("clip the gradients: torch.nn.utils.clip_grad_norm_(parameters, 1.0)", safety="changes-training")
    return draft.because(noticed(evidence))


def _made_huge(evidence: NumbersEvidence) -> Draft | None:
    """Weights that no update has made as large as they are."""
    huge = huge_weights(evidence)
    if huge is None:
        return None
    message = "training diverged: the weights were far too large before their first update"
    why = f"the matrices have values of about {huge.size:.2g}, and no update has made them so: the script has"
    draft = check.draft(evidence, "likely", message, why)
    draft.at(*huge.places)
    draft.mark(evidence.spot, "surfaced", "this is where it overflowed")
    draft.mark(evidence.noticed, "surfaced" if draft.has_place else "cause", "noticed here")
    draft.help("where weights of several models are merged, divide their sum by the number of models")
    return draft.because(noticed(evidence))


def _described(found: LossGrowth | None, grown: WeightGrowth | None) -> tuple[str, str]:
    """The message and the cause."""
    if found is not None:
        factor = abs(found.end) / max(abs(found.start), 1e-12)
        return (
            f"training diverged: the loss grew {factor:.3g} times in {found.steps} steps, then overflowed",
            f"the loss grew from {number(found.start)} to {number(found.end)} before it stopped being finite",
        )
    assert grown is not None
    factor = grown.end / grown.start
    return (
        f"training diverged: the largest weight grew {factor:.3g} times in {grown.updates} updates",
        f"the updates took the largest weight from {number(grown.start)} to {number(grown.end)}",
    )
