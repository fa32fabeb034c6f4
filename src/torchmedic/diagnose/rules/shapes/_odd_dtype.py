"""Which tensor of a failing call has a dtype that the operation does not accept."""

from __future__ import annotations

import re

import msgspec
import torch

from torchmedic.diagnose.rules.shapes._shapes import PRODUCTS
from torchmedic.diagnose.words.tensors import dtype
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Argument, Call

_UNIFORM = PRODUCTS | frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm batch_norm group_norm "
    "instance_norm lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scatter scatter_add "
    "scatter_reduce index_put index_add index_copy masked_scatter lerp inner ger outer multi_head_attention_forward "
    "_native_multi_head_attention _transformer_encoder_layer_fwd native_multi_head_attention baddbmm cdist prelu "
    "grid_sample solve linalg_solve cross addcmul addcdiv".split()
)
# Where the index stands among the arguments of a lookup.
_INDEX = {
    "gather": (2, "index"),
    "scatter": (2, "index"),
    "scatter_add": (2, "index"),
    "index_select": (2, "index"),
    "index_add": (2, "index"),
    "index_fill": (2, "index"),
    "take": (1, "index"),
    "one_hot": (0, "tensor"),
    "bincount": (0, "input"),
}
_LOSSES = frozenset("cross_entropy cross_entropy_loss nll_loss nll_loss_nd".split())
_MASK = {
    "masked_fill": (1, "mask"),
    "masked_select": (1, "mask"),
    "masked_scatter": (1, "mask"),
    "where": (0, "condition"),
}
_WHOLE = (torch.int64, torch.int32, torch.bool, torch.uint8)
_NAMES = {
    torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"),
    torch.int16: ("Short",),
    torch.int8: ("Char", "signed char"),
    torch.uint8: ("Byte", "unsigned char"),
    torch.bool: ("Bool", "bool"),
    torch.float16: ("Half", "c10::Half"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
    torch.complex64: ("ComplexFloat",),
    torch.complex128: ("ComplexDouble",),
}


class Odd(msgspec.Struct, frozen=True):
    """The tensor of the wrong dtype, the dtype that was needed, and for what."""

    tensor: torch.Tensor
    wanted: str
    what: str
    why: str = ""
    call: Call | None = None
    in_place: bool = False


def odd_one(evidence: RaisedEvidence) -> Odd | None:
    """The first explanation that the live tensors bear out, from the innermost call outwards."""
    for call in evidence.calls:
        found = (
            _lookup(call)
            or _masked(call)
            or _written(call)
            or _weighted(call)
            or _mixed(evidence, call)
            or _unsupported(evidence, call)
        )
        if found is not None:
            return found
    return _recurrent(evidence) or _tracked(evidence)


def _what(call: Call) -> str:
    return {"index": "an index", "index_put_": "an assignment", "_make_subclass": "a gradient"}.get(
        call.op, f"`{call.op}`"
    )


def _lookup(call: Call) -> Odd | None:
    op = call.op.rstrip("_")
    if op in ("embedding", "embedding_bag"):
        # torch's Python function takes (input, weight), the C++ one behind it (weight, indices).
        index = next((found for found in call.tensors[:2] if not _is_parameter(call, found)), None)
        if index is not None and index.value.dtype not in (torch.int64, torch.int32):
            return Odd(index.value, "int64", _what(call), "; it holds the numbers of rows to look up", call)
        return None
    if op in ("index", "index_put") and len(call.arguments) > 1 and call.arguments[0].tensor is not None:
        index_value = call.arguments[1].value
        for part in index_value if isinstance(index_value, tuple) else (index_value,):
            if isinstance(part, torch.Tensor) and part.dtype not in _WHOLE:
                return Odd(part, "int64 or bool", _what(call), "; an index is a whole number or a mask", call)
        return None
    if op in _INDEX:
        value = call.get(*_INDEX[op])
        if isinstance(value, torch.Tensor) and (
            value.dtype not in _WHOLE or (op == "one_hot" and value.dtype != torch.int64)
        ):
            return Odd(value, "int64", _what(call), "; an index is a whole number", call)
    return None


def _masked(call: Call) -> Odd | None:
    op = call.op.rstrip("_")
    value = call.get(*_MASK[op]) if op in _MASK else None
    if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
        return Odd(value, "bool", _what(call), "; a mask is boolean", call)
    return None


def _written(call: Call) -> Odd | None:
    """`counts += scores`: the result does not fit into the dtype of what is written to."""
    if not call.op.endswith("_") or len(call.arguments) < 2 or call.op.endswith("__"):
        return None
    target, source = call.arguments[0].value, call.arguments[1].value
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor | float | int):
        return None
    result = torch.result_type(target, source)
    if call.op == "div_" and not result.is_floating_point:
        result = torch.get_default_dtype()
    if torch.can_cast(result, target.dtype):
        return None
    return Odd(
        target, dtype(result), _what(call), f"; the result is {dtype(result)} and is to be written into it", call, True
    )


def _weighted(call: Call) -> Odd | None:
    """The weights of the classes, which are given to a loss beside its scores."""
    scores, weight = call.get(0, "input"), call.get(2, "weight")
    if call.op not in _LOSSES or not isinstance(scores, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return None
    if weight.dtype == scores.dtype or not scores.is_floating_point():
        return None
    return Odd(weight, dtype(scores), f"the weight of {_what(call)}", f"; the scores are {dtype(scores)}", call)


def _mixed(evidence: RaisedEvidence, call: Call) -> Odd | None:
    if call.op.rstrip("_") not in _UNIFORM:
        return None
    tensors = [found for found in call.tensors if not _is_exempt(call, found)]
    if len({found.value.dtype for found in tensors}) < 2:
        return None
    of_weights = _dtype_of_weights(evidence)
    known = max(tensors, key=lambda each: (_is_parameter(call, each), each.value.dtype is of_weights, *_is_meant(each)))
    odd = next(found for found in tensors if found.value.dtype != known.value.dtype)
    whose = "its weights are" if _is_parameter(call, known) else f"`{known.text}` is" if known.text else "the other is"
    return Odd(odd.value, dtype(known.value), _what(call), f"; {whose} {dtype(known.value)}", call)


def _is_meant(found: Argument) -> tuple[bool, ...]:
    """How likely the dtype of a tensor is what was meant, where several differ: the highest is."""
    kind = found.value.dtype
    return found.value.requires_grad, kind.is_floating_point, kind is torch.get_default_dtype()


def _dtype_of_weights(evidence: RaisedEvidence) -> torch.dtype | None:
    """The one dtype of all weights of the innermost module that has some."""
    for frame in reversed(evidence.frames):
        kinds = {each.dtype for each in frame.module.parameters()} if frame.module is not None else set()
        if kinds:
            return kinds.pop() if len(kinds) == 1 else None
    return None


def _is_exempt(call: Call, found: Argument) -> bool:
    """Indices and masks are not part of the arithmetic."""
    op = call.op.rstrip("_")
    if op in ("index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "masked_scatter"):
        return not found.value.is_floating_point() and found is not call.tensors[0] and found is not call.tensors[-1]
    return found.value.dtype is torch.bool or found.name in ("attn_mask", "key_padding_mask", "batch_sizes")


def _is_parameter(call: Call, found: Argument) -> bool:
    named = found.text == "self.weight" or (found.text == "weight" and not call.frame.is_user)
    return named or isinstance(found.value, torch.nn.Parameter)


def _unsupported(evidence: RaisedEvidence, call: Call) -> Odd | None:
    """One dtype for all, but not one that the operation can compute in: torch names it."""
    named = re.search(
        r"not implemented for '(\w+)'|[Gg]ot:? ?'?([A-Z]\w+)'?|attn_mask.dtype: ([\w ]+?) and|ScalarType (\w+)",
        evidence.message,
    )
    name = next((part for part in named.groups() if part), "") if named else ""
    for found in call.tensors:
        kind = found.value.dtype
        if name and name in _NAMES.get(kind, ()):
            why = "; NumPy has no such dtype" if evidence.says("unsupported ScalarType") else ""
            return Odd(found.value, _needed(evidence, kind), _what(call), why, call)
    if evidence.says("floating") or evidence.says("float or double") or evidence.says("integer and Boolean"):
        only = [
            found for found in call.tensors if found.value.is_floating_point() is evidence.says("integer and Boolean")
        ]
        if len(call.tensors) == 1 and only:
            return Odd(only[0].value, _needed(evidence, only[0].value.dtype), _what(call), "", call)
    if evidence.says("bool tensor") and call.tensors and all(found.value.dtype is torch.bool for found in call.tensors):
        return Odd(call.tensors[0].value, "numbers", _what(call), "; booleans are not subtracted", call)
    return None


def _needed(evidence: RaisedEvidence, kind: torch.dtype) -> str:
    if evidence.says("bitwise") or evidence.says("invert"):
        return "bool"
    if kind.is_floating_point and evidence.says("index"):
        return "int64"
    return "float32" if kind != torch.float32 else "another"


def _recurrent(evidence: RaisedEvidence) -> Odd | None:
    """Recurrent layers compare dtypes in Python before they call anything."""
    for frame in reversed(evidence.library_frames):
        if isinstance(frame.module, torch.nn.RNNBase) and isinstance(
            given := frame.variables.get("input"), torch.Tensor
        ):
            weight = next(iter(frame.module.parameters()), None)
            if weight is not None and weight.dtype != given.dtype:
                return Odd(
                    given, dtype(weight), f"`{type(frame.module).__name__}`", f"; its weights are {dtype(weight)}"
                )
    return None


def _tracked(evidence: RaisedEvidence) -> Odd | None:
    """Whole numbers have no gradient."""
    if not evidence.says("can require gradients"):
        return None
    for call in evidence.calls:
        for found in call.tensors:
            if not found.value.is_floating_point():
                return Odd(found.value, "float32", "a gradient", "; whole numbers have no gradient", call)
    return None
