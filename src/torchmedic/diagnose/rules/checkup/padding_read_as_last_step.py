"""The last step of padded sequences is read, which is padding for all but the longest sequences.

What: `pad_packed_sequence` gives a tensor as long as the longest sequence, and fills the rest of the others with
padding. The script takes the last step of the tensor and gives it to a layer. For each shorter sequence that is a row
of zeros, and not the state after its last step.

Why: `output[:, -1]` is right for sequences of one length only. The model gets the same zeros for each shorter sequence,
so it cannot tell them apart. No error is raised.

Cure: take the last hidden state, which the layer returns beside the output: `h_n[-1]`. Or take each sequence's own last
step: `output[torch.arange(len(lengths)), lengths - 1]`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.padded_ends import padded_ends


@rule("TM657", "padding-read-as-last-step")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for node, padded, sequences in padded_ends(graph):
            draft = check.draft(evidence, "proven")
            draft.message = f"padding is read instead of the last step of {padded} of {sequences} sequences"
            draft.cause = (
                "the last step of the padded tensor is a step of the longest sequences only; the others have "
                "padding there"
            )
            draft.at(evidence.of_node("cause", node, "takes the last step of the padded tensor"))
            draft.because(f"the sequences of the batch of step {graph.step} were packed, and differ in length")
            draft.help(
                "use the last hidden state that the layer returns, `h_n[-1]` (of two directions: "
                "`torch.cat([h_n[-2], h_n[-1]], 1)`), or each sequence's own last step, "
                "`output[torch.arange(len(lengths)), lengths - 1]`",
                safety="changes-training",
            )
            return draft.about(step=graph.step).rated("warning")
    return None
