"""The loss counts padding: a part of its targets are positions of padding.

What: the targets were compared with the tokens that the model was given. At the positions of padding, the loss has
targets that count, and they are all the same class.

Why: `cross_entropy` leaves out the targets that are equal to `ignore_index`, which is -100 unless it is set. Padding of
another value counts like any token. The model soon predicts it well, so that the loss looks better than it is, and a
batch with much padding teaches less than one with little. No error is raised.

Cure: set `ignore_index` to the padding token, or set the targets of padding to -100.
"""

from __future__ import annotations

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.batch_entry import made_at
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.padded_targets import MIN_SHARE, PaddedTargets
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location

_LABELS = "labels"  # what a model that computes its own loss calls its targets


@rule("TM660", "padding-in-loss")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for padded in graph.tokens.padded:
            if padded.share < MIN_SHARE:
                continue
            draft = check.draft(evidence, "likely")
            draft.message = f"the loss counts padding: {padded.share:.0%} of its targets belong to padding"
            draft.cause = "at positions of padding the targets are not left out, and are all the same"
            draft.at(*_places(evidence, padded))
            draft.because(f"the targets were compared with the tokens of the batch of step {graph.step}")
            draft.help(
                "set the targets of padding to -100, or give the loss the padding token as `ignore_index`",
                safety="changes-training",
            )
            return draft.about(step=graph.step).rated("warning")
    return None


def _places(evidence: CheckUp, padded: PaddedTargets) -> list[Location | None]:
    """Where the loss was built or called, or where a model that computes its own loss was given the targets."""
    birth = padded.node.birth
    layer = birth.layer() if birth is not None and birth.layer is not None else None
    label = "counts each target that is not -100"
    if birth is None or layer is None or isinstance(layer, nn.modules.loss._Loss):
        return [evidence.of_birth("cause", birth, label) if birth is not None else None]
    made = made_at(_LABELS)
    called = evidence.at("surfaced" if made is not None else "cause", padded.call.sites, label)
    return [node_location("cause", *made, "padding is a target, too"), called] if made is not None else [called]
