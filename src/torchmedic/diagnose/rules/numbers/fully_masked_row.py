"""A softmax was computed over a row in which every entry is masked.

What: masking writes minus infinity into attention scores or logits. If a whole row is masked, its softmax is 0 / 0,
which is NaN, and the NaN reaches every weight.

Why: a sequence of length 0, a padding mask with the wrong meaning (True where it should be False), a causal mask that
is combined with a padding mask or turned round, a query that may attend to nothing.

Cure: leave at least one entry of each row unmasked, mask with a large negative number instead of -inf, or set the
result of such rows to zero.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.edits import whole
from torchmedic.diagnose.cures.numbers import Cure, first_that_passes
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, finish, rows
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Captured, Leaf, Op
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import callee

_MIN_POSITIONS = 3
_SOFTMAXES = frozenset("softmax log_softmax safe_softmax logsumexp softmax_backward_data masked_softmax".split())


@rule("TM208", "fully-masked-row")
def check(evidence: NumbersEvidence) -> Draft | None:
    birth = evidence.birth
    if birth is None or evidence.scope is None:
        return None
    # An infinity that came from an operation and was meant as a mask leads back to the softmax that it spoiled.
    for op in (birth.op, birth.spoiled):
        if op is None:
            continue
        blamed = evidence.scope.forward_of(op)
        values = evidence.replay_with_values(blamed)
        if values is None:
            continue
        masked = _masked_rows(blamed, values)
        if masked is not None and (op is birth.op or _meant_as_mask(evidence, birth.op)):
            return _diagnosis(evidence, blamed, values, masked)
    return None


def _masked_rows(op: Op, values: Captured) -> torch.Tensor | None:
    """Which rows hold nothing but minus infinity."""
    if op.kind in _SOFTMAXES:
        scores, dim = values.argument(0), values.argument(1, "dim", -1)
    elif op.kind in ("sub", "exp"):
        # Written out by hand: the maximum of such a row is -inf as well.
        scores, dim = values.argument(0), -1
    else:
        return None
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or not scores.dim():
        return None
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    masked = (scores == -torch.inf).all(dim=dims[0], keepdim=True) if len(dims) == 1 else None
    return masked if masked is not None and bool(masked.any()) else None


def _meant_as_mask(evidence: NumbersEvidence, op: Op | None) -> bool:
    """Whether an operation that made minus infinities made a mask: the log of zeros, or huge negatives added up."""
    values = evidence.replay_with_values(op) if op is not None else None
    if op is None or values is None or not values.outputs:
        return False
    made = values.outputs[0]
    if bool((made == torch.inf).any()) or bool(made.isnan().any()):
        return False
    if bool(((made == 0) | (made == -torch.inf)).all()):
        return True
    lowest = torch.finfo(made.dtype).min
    return op.kind in ("add", "sub", "mul") and any(
        bool((tensor <= lowest / 4).any()) for tensor in values.tensors if tensor.is_floating_point()
    )


def _diagnosis(evidence: NumbersEvidence, op: Op, values: Captured, masked: torch.Tensor) -> Draft:
    scores = values.argument(0)
    width = scores.numel() // max(1, masked.numel())
    hit = int(masked.sum().item())
    name = op.kind.replace("safe_", "")
    where = rows(masked, evidence)
    event = f"`{name}` of a row in which everything is masked"
    why = f"{hit} of {masked.numel()} rows that `{name}` runs over contain only -inf ({width} entries)"
    label = f"all {width} entries are -inf"
    maker = _mask_maker(evidence, op)
    if maker is not None and maker.spot is not None and _sees_only_later(scores):
        label = "hides each position, and all that come before it"
        draft = begin(check, evidence, event, why, label=label, bad=masked, spot=maker.spot)
        draft.because("each position sees the later ones only, so the last one sees nothing")
        advice = "turn the mask round: a causal mask hides the later positions"
        draft.treat(first_that_passes(evidence, _inversions(maker.spot)), otherwise=advice)
        return finish(draft, evidence)
    draft = begin(check, evidence, event, why, label=label, bad=masked, spot=op.spot)
    if maker is not None and maker.spot is not None:
        draft.at(maker.spot.location("origin", f"masked here{', all of ' + where if where else ''}"))
    draft.because(f"the scores are {list(scores.shape)}, of which {int((scores == -torch.inf).sum().item())} are -inf")
    draft.treat(first_that_passes(evidence, _cures(maker)))
    draft.help("make sure that no row is masked completely: skip empty sequences, check what True means in the mask")
    return finish(draft, evidence)


def _sees_only_later(scores: torch.Tensor) -> bool:
    """Whether scores of all positions with all positions have the mask of a causal attention turned round."""
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2] or scores.shape[-1] < _MIN_POSITIONS:
        return False
    is_seen = (scores != -torch.inf).reshape(-1, *scores.shape[-2:])
    return bool((is_seen == torch.ones_like(is_seen[0]).triu(1)).all())


def _inversions(spot: Spot) -> Iterator[Cure]:
    """The mask of `masked_fill` turned round."""
    found = node_at(spot)
    for part in ast.walk(found[0]) if found is not None else ():
        if isinstance(part, ast.Call) and callee(part).rstrip("_") == "masked_fill" and part.args:
            mask = part.args[0] if isinstance(part.func, ast.Attribute) and len(part.args) > 1 else None
            if mask is not None:
                text = f"~({ast.unparse(mask)})" if not isinstance(mask, ast.Name) else f"~{mask.id}"
                title = "turn the mask round"
                yield Cure(title, text, whole(spot, mask), safety="changes-training", same_values=False)
                return


def _mask_maker(evidence: NumbersEvidence, op: Op) -> Op | None:
    """The operation that wrote the infinities."""
    scope = evidence.scope
    assert scope is not None
    value = op.inputs[0]
    for _ in range(8):
        source = scope.source(value, lambda magnitude: magnitude == float("inf"))
        if source is None or isinstance(source, Leaf):
            return None
        made = scope.ops[source]
        if made.explicit or not any(scope.magnitude(given) == float("inf") for given in made.inputs):
            return made
        value = next(given for given in made.inputs if scope.magnitude(given) == float("inf"))
    return None


def _cures(maker: Op | None) -> Iterator[Cure]:
    """Write a large negative number where the code writes minus infinity."""
    found = node_at(maker.spot) if maker is not None and maker.spot is not None else None
    if found is None or maker is None or maker.spot is None:
        return
    for part in ast.walk(found[0]):
        if isinstance(part, ast.expr) and _is_minus_infinity(part):
            title = "mask with a large negative number instead of -inf"
            yield Cure(title, "-1e9", whole(maker.spot, part), same_values=False)
            return


def _is_minus_infinity(node: ast.expr) -> bool:
    text = ast.unparse(node).replace('"', "'").replace(" ", "").lower()
    return text in (
        "float('-inf')",
        "-float('inf')",
        "-torch.inf",
        "-math.inf",
        "-np.inf",
        "-inf",
        "-numpy.inf",
        "float('-infinity')",
    )
