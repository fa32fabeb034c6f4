"""What a loss that raised was given: its input and its target, wherever in torch it raised."""

from __future__ import annotations

import msgspec
import torch

from torchmedic.evidence.exception import RaisedEvidence

# Losses that pick the score of a class: the target holds class indices, or a probability for each class.
CLASSIFYING = ("cross_entropy", "nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss")
_PAIRED = (
    *CLASSIFYING,
    *"multi_margin_loss multilabel_margin_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss "
    "smooth_l1_loss huber_loss kl_div gaussian_nll_loss poisson_nll_loss soft_margin_loss hinge_embedding_loss "
    "multilabel_soft_margin_loss".split(),
)


class Given(msgspec.Struct, frozen=True):
    """A loss by name, with the tensors that it was given."""

    loss: str
    input: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None = None

    @property
    def expected_target(self) -> list[int]:
        """The shape of class indices that fits the scores: theirs, without the dimension of the classes."""
        sizes = list(self.input.shape)
        return [] if len(sizes) == 1 else [sizes[0], *sizes[2:]]


def given_to_loss(evidence: RaisedEvidence, *losses: str) -> Given | None:
    """The input and target of the innermost loss function that the exception came out of."""
    wanted = losses or _PAIRED
    frame = evidence.inside(*wanted)
    if frame is not None:
        known = frame.variables
        values = [known.get("input", known.get("input1")), known.get("target"), known.get("weight")]
        return _given(frame.function, *values)
    call = evidence.find(*wanted)
    if call is None:
        return None
    names = (call.argument(0, "input"), call.argument(1, "target"), call.argument(2, "weight"))
    return _given(call.op, *(None if found is None else found.value for found in names))


def _given(loss: str, scores: object, target: object, weight: object) -> Given | None:
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    return Given(loss, scores, target, weight if isinstance(weight, torch.Tensor) else None)
