"""Which operations work element by element, and why the shapes that one of them was given do not fit."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchmedic.diagnose.rules.shapes._shapes import broadcast_clash
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import UNKNOWN, Argument, Call

COMPARISONS = frozenset("compare eq ne lt le gt ge equal greater less not_equal greater_equal less_equal".split())
ELEMENTWISE = COMPARISONS | frozenset(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub atan2 "
    "maximum minimum fmax fmin bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor where masked_fill "
    "lerp addcmul addcdiv broadcast_tensors copy hypot logaddexp xlogy cosine_similarity "
    "pairwise_distance kl_div mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss "
    "margin_ranking_loss hinge_embedding_loss triplet_margin_loss poisson_nll_loss masked_select expand expand_as "
    "broadcast_to index index_put heaviside isclose allclose dist "
    "gather scatter scatter_add scatter_reduce".split()
) - {"equal"}
_LOOKUPS = frozenset("gather scatter scatter_add scatter_reduce".split())
_SAME_SHAPE = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "bitwise_and": "&", "bitwise_or": "|"}


class Misfit(msgspec.Struct, frozen=True):
    """Two shapes that do not fit: what was done with them, and where they differ. `right` may be sizes, no tensor."""

    what: str
    left: Argument
    right: Argument
    why: str
    squeezed: tuple[int, ...] = ()
    is_comparison: bool = False
    is_batch_first: bool = False  # it would fit if a layer took the batch as its first dimension


def misfit_of(call: Call) -> Misfit | None:
    """Why an elementwise operation cannot be done; None if it can, or if an operand is not known."""
    op = call.op.rstrip("_")
    tensors = call.tensors
    if op in ("index", "index_put"):
        return _indexed(call)
    if op in ("expand", "broadcast_to"):
        return _expanded(call)
    if op in _LOOKUPS:
        return _looked_up(call)
    for position, left in enumerate(tensors):
        for right in tensors[position + 1 :]:
            clash = broadcast_clash([left.value.shape, right.value.shape])
            if clash is not None:
                back, one, other = clash
                why = f"{one} meets {other} in dimension {_dimension(back, left.value, right.value)}"
                return _misfit(call, left, right, why)
    written = call.op.endswith("_") or op in ("copy", "expand_as")
    if written and len(tensors) == 2:
        target, source = tensors if op != "expand_as" else tensors[::-1]
        whole = torch.broadcast_shapes(target.value.shape, source.value.shape)
        if whole != target.value.shape:
            why = f"the result, {list(whole)}, does not fit into {list(target.value.shape)}"
            return _misfit(call, target, source, why)
    return None


def _misfit(call: Call, left: Argument, right: Argument, why: str) -> Misfit:
    op = call.op.rstrip("_")
    in_place = "=" if call.op.endswith("_") and op in _SYMBOLS and call.function is None else ""
    what = f"`{_SYMBOLS.get(op, op) if call.function is None else call.op}{in_place}`"
    if op == "compare":
        what = "a comparison"
    if op == "broadcast_tensors":
        what = "an elementwise operation"
    return Misfit(what, left, right, why, _squeezed(left.value, right.value), op in COMPARISONS)


def _dimension(back: int, a: torch.Tensor, b: torch.Tensor) -> int:
    """The number that torch gives a dimension: from the left of the longer shape."""
    return max(a.dim(), b.dim()) + back


def _squeezed(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape that both have once sizes of 1 are left out, if they then are equal."""
    one, other = (tuple(size for size in tensor.shape if size != 1) for tensor in (a, b))
    return one if one and one == other and a.shape != b.shape else ()


def _indexed(call: Call) -> Misfit | None:
    owner = call.arguments[0].value
    if not isinstance(owner, torch.Tensor) or len(call.arguments) < 2 or call.arguments[1].value is UNKNOWN:
        return None
    index = call.arguments[1].value
    parts = index if isinstance(index, tuple) else (index,)
    at = 0
    whole: list[Argument] = []
    for part in parts:
        if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
            covered = owner.shape[at : at + part.dim()]
            if part.shape != covered:
                why = f"a mask of {list(part.shape)} covers dimensions of {list(covered)}"
                return Misfit("an index", call.arguments[0], Argument(call.arguments[1].node, part), why)
            at += part.dim()
        elif part is None or part is Ellipsis:
            break
        else:
            at += 1
            if isinstance(part, torch.Tensor):
                whole.append(Argument(None, part))
    clash = broadcast_clash([part.value.shape for part in whole])
    if clash is not None:
        one = next(part for part in whole if part.value.dim() >= -clash[0] and part.value.shape[clash[0]] == clash[1])
        two = next(part for part in whole if part.value.dim() >= -clash[0] and part.value.shape[clash[0]] == clash[2])
        return Misfit("an index", one, two, f"index tensors with {clash[1]} and {clash[2]} elements meet")
    return _put(call, owner, index) if len(call.arguments) > 2 else None


def _put(call: Call, owner: torch.Tensor, index: Any) -> Misfit | None:
    value = call.arguments[2]
    if value.tensor is None or owner.device.type != "cpu":
        return None
    try:
        chosen = owner.detach()[index]
    except Exception:  # an index out of range is another rule's
        return None
    clash = broadcast_clash([chosen.shape, value.value.shape])
    if clash is None:
        extra = value.value.dim() > chosen.dim() and any(
            size != 1 for size in value.value.shape[: -chosen.dim() or None]
        )
        if not extra:
            return None
    why = f"{list(value.value.shape)} does not fit into the {list(chosen.shape)} that is written to"
    return Misfit("an assignment", Argument(call.arguments[0].node, chosen), value, why)


def _looked_up(call: Call) -> Misfit | None:
    """`gather` and `scatter`: the index has as many dimensions as the tensor, and no larger sizes but along `dim`."""
    owner, along, index = call.argument(0, "input"), call.get(1, "dim"), call.argument(2, "index")
    if owner is None or index is None or owner.tensor is None or index.tensor is None or not isinstance(along, int):
        return None
    a, b = list(owner.value.shape), list(index.value.shape)
    if len(a) != len(b):
        return Misfit(f"`{call.op}`", owner, index, f"an index of {len(b)} dimensions for a tensor of {len(a)}")
    source = call.argument(3, "src")
    values = list(source.value.shape) if source is not None and source.tensor is not None else []
    if source is not None and len(values) == len(b) and any(map(int.__gt__, b, values)):
        return Misfit(f"`{call.op}`", index, source, "the index is larger than the values to be written")
    for at, (room, size) in enumerate(zip(a, b, strict=True)):
        if at != along % max(len(a), 1) and size > room:
            return Misfit(f"`{call.op}`", owner, index, f"the index has {size} in dimension {at}, the tensor {room}")
    return None


def _expanded(call: Call) -> Misfit | None:
    source = call.arguments[0]
    rest = [argument.value for argument in call.arguments[1:] if argument.name in ("", "size")]
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if source.tensor is None or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    have = list(source.value.shape)
    if len(sizes) < len(have):
        why = f"{len(sizes)} sizes are too few for {len(have)} dimensions"
    else:
        pairs = list(zip(reversed(have), reversed(sizes), strict=False))
        odd = next(((size, wanted) for size, wanted in pairs if wanted not in (-1, size) and size != 1), None)
        if odd is None:
            return None
        why = f"a dimension of {odd[0]} cannot become {odd[1]}: only a size of 1 is repeated"
    return Misfit(f"`{call.op}`", source, Argument(None, sizes), why)


def misfit_of_loss(evidence: RaisedEvidence) -> Misfit | None:
    """Losses that want input and target of one shape, whether or not they broadcast."""
    frame = evidence.inside(*_SAME_SHAPE)
    if frame is None:
        return None
    given, target = frame.variables.get("input"), frame.variables.get("target")
    if not isinstance(given, torch.Tensor) or not isinstance(target, torch.Tensor) or given.shape == target.shape:
        return None
    return Misfit(
        f"`{frame.function}`",
        Argument(None, given, "input"),
        Argument(None, target, "target"),
        "input and target must have the same shape",
        _squeezed(given, target),
    )


def misfit_of_mask(evidence: RaisedEvidence) -> Misfit | None:
    """Masks of attention, and samples that a distribution is asked about."""
    frame = evidence.inside("multi_head_attention_forward", "_validate_sample")
    if frame is None:
        return _attention_mask(evidence.find("scaled_dot_product_attention"))
    known = frame.variables
    if frame.function == "_validate_sample":
        value, owner = known.get("value"), known.get("self")
        if not isinstance(value, torch.Tensor) or owner is None:
            return None
        sizes = (*owner.batch_shape, *owner.event_shape)
        if broadcast_clash([value.shape, sizes]) is None:
            return None
        why = f"the distribution is over {list(sizes)}"
        return Misfit(f"`{type(owner).__name__}`", Argument(None, value, "value"), Argument(None, list(sizes)), why)
    query, key = known.get("query"), known.get("key")
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor) or key.dim() != 3:
        return None
    length, batch, source = query.shape[0], query.shape[1], key.shape[0]
    heads = known.get("num_heads")
    expected: dict[str, list[tuple[int, ...]]] = {
        "attn_mask": [(length, source), (batch * heads, length, source) if isinstance(heads, int) else ()],
        "key_padding_mask": [(batch, source)],
    }
    for name, shapes in expected.items():
        mask = known.get(name)
        if isinstance(mask, torch.Tensor) and tuple(mask.shape) not in shapes:
            why = f"`{name}` must be {list(shapes[0])}"
            layers = [each.module for each in evidence.frames if isinstance(each.module, torch.nn.MultiheadAttention)]
            fits = name == "key_padding_mask" and tuple(mask.shape) == (length, key.shape[1])
            is_first = fits and bool(layers) and not layers[-1].batch_first
            sides = Argument(None, query, "query"), Argument(None, mask, name)
            return Misfit("attention", *sides, why, is_batch_first=is_first)
    return None


def _attention_mask(call: Call | None) -> Misfit | None:
    if call is None:
        return None
    query, key, mask = call.get(0, "query"), call.get(1, "key"), call.get(3, "attn_mask")
    if not all(isinstance(part, torch.Tensor) and part.dim() > 1 for part in (query, key, mask)):
        return None
    scores = (*query.shape[:-1], key.shape[-2])
    if broadcast_clash([scores, mask.shape]) is None:
        return None
    why = f"the mask must broadcast to the scores, {list(scores)}"
    return Misfit("attention", Argument(None, query, "query"), Argument(None, mask, "attn_mask"), why)
