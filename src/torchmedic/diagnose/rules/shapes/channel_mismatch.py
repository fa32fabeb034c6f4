"""The input of a layer has a different number of channels, or of dimensions, from what the layer was built for.

What: convolutions and normalisation layers are built for a fixed number of channels. torch expects the channels in
dimension 1 of a batch (`N, C, H, W`); `LayerNorm` and `RMSNorm` use the last dimensions.

Why: images with the channels last (`N, H, W, C`, as in NumPy, PIL and OpenCV), a missing batch or channel dimension, a
grey image where a colour image was expected, or a layer whose width differs from the output of the layer before it.

Cure: permute the input to channels first, add the missing dimension, or build the layer for the number of channels of
its input.
"""

from __future__ import annotations

import re

import msgspec
import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._input_size import is_of_model
from torchmedic.diagnose.rules.shapes._shapes import by_message
from torchmedic.diagnose.words.tensors import built_here, count, fed_by, layer_name, layer_of, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Call

_CONV = re.compile(r"conv(_transpose)?([123])d")
_NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "prelu", "instance_norm")


class _Finding(msgspec.Struct, frozen=True):
    """What is wrong with an input, the number that was given and the one that was needed, and how it is laid out."""

    input: torch.Tensor
    given: str
    wanted: str
    channels: int = 0  # needed
    spatial: int = 0


@rule("TM152", "channel-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "NotImplementedError"}:
        return None
    call = next((call for call in evidence.calls if _CONV.fullmatch(call.op) or call.op in _NORMS), None)
    layer = layer_of(evidence, call)
    found = (_in_call(call) if call is not None else None) or _in_layer(evidence, layer) or _dimensions(evidence)
    if found is None:
        return by_message(check, evidence, _MESSAGES, "a layer was given {}", _ADVICE)
    op = call.op if call is not None else evidence.calls[0].op if evidence.calls else "layer"
    name = layer_name(evidence, layer) if layer is not None else f"`{op.lstrip('_')}`"
    draft = check.draft(evidence, "proven")
    draft.message = f"{name} was given {found.given} where it takes {found.wanted}"
    draft.cause = f"its input is {shape(found.input)}"
    built = built_here(evidence, layer, f"the layer is built for {found.wanted} here")
    is_wrong_size = built is not None and layer is not None and _is_built_wrong(evidence, layer, found)
    label = f"{shape(found.input)}: {found.given}, not {found.wanted}"
    draft.at(msgspec.structs.replace(built, role="cause") if built is not None and is_wrong_size else None)
    draft.at(*evidence.at_user_line("surfaced" if is_wrong_size else "cause", label))
    draft.at(made_here(evidence, found.input, f"becomes {shape(found.input)}"), None if is_wrong_size else built)
    draft.because(fed_by(evidence, layer))
    _advise(draft, found)
    return draft


def _is_built_wrong(evidence: RaisedEvidence, layer: nn.Module, found: _Finding) -> bool:
    """Whether the number of channels differs, not their place, and other layers of the model give the input its own."""
    sizes = list(found.input.shape)
    is_batch = found.channels and len(sizes) == found.spatial + 2
    return bool(is_batch) and not _channels_last(sizes, found.channels) and is_of_model(evidence, layer, found.input)


def _advise(draft: Draft, found: _Finding) -> None:
    sizes = list(found.input.shape)
    batched = found.spatial + 2
    if found.spatial and len(sizes) == batched and _channels_last(sizes, found.channels):
        draft.because(f"the last dimension has {found.channels}: the channels seem to stand last, not in dimension 1")
        order = [0, batched - 1, *range(1, batched - 1)]
        draft.help(f"put the channels first: `.permute({', '.join(map(str, order))})`")
    elif found.spatial and len(sizes) == batched - 1:
        draft.because(f"an input of {len(sizes)} dimensions is taken for one sample, so dimension 0 for its channels")
        if found.channels == 1:
            draft.help("add the channel dimension that is missing: `.unsqueeze(1)`")
        else:
            draft.help(f"give it a batch of {batched} dimensions with {found.channels} channels in dimension 1")
    elif found.spatial and len(sizes) < batched - 1:
        draft.help(f"give it {batched} dimensions: batch, channels and {found.spatial} of space")
    else:
        draft.help(f"build the layer for {found.given}, or bring its input to {found.wanted}")


def _channels_last(sizes: list[int], channels: int) -> bool:
    """The last size is the number of channels, and the layout is no more plausible as it is."""
    return sizes[-1] == channels and (sizes[-1] != sizes[-2] or len(set(sizes[1:-1])) == 1)


def _in_call(call: Call) -> _Finding | None:
    given = call.get(0, "input")
    if not isinstance(given, torch.Tensor):
        return None
    conv = _CONV.fullmatch(call.op)
    if conv is not None:
        return _convolution(call, given, int(conv[2]), transposed=conv[1] is not None)
    if call.op in ("layer_norm", "rms_norm"):
        wanted = call.get(1, "normalized_shape")
        if isinstance(wanted, tuple | list) and list(given.shape[-len(wanted) :]) != list(wanted):
            return _Finding(given, f"last sizes {shape(given.shape[-len(wanted) :])}", shape(list(wanted)))
        return None
    if given.dim() < 2:
        return None
    channels = int(given.shape[1])
    sizes = [tensor.value.numel() for tensor in call.tensors[1:] if tensor.value.dim() == 1]
    if sizes and sizes[0] != channels and not (call.op == "prelu" and sizes[0] == 1):
        return _Finding(given, count(channels, "channel"), str(sizes[0]), sizes[0], max(given.dim() - 2, 0))
    groups = call.get(1, "num_groups")
    if call.op == "group_norm" and isinstance(groups, int) and channels % groups:
        return _Finding(given, count(channels, "channel"), f"a multiple of {groups}", 0, given.dim() - 2)
    return None


def _convolution(call: Call, given: torch.Tensor, spatial: int, *, transposed: bool) -> _Finding | None:
    weight = call.get(1, "weight")
    if not isinstance(weight, torch.Tensor) or weight.dim() != spatial + 2:
        return None
    groups = call.get(6, "groups")
    groups = groups if isinstance(groups, int) else 1
    wanted = int(weight.shape[0]) if transposed else int(weight.shape[1]) * groups
    if given.dim() not in (spatial + 1, spatial + 2):
        return _Finding(given, count(given.dim(), "dimension"), f"{spatial + 2}", wanted, spatial)
    channels = int(given.shape[-spatial - 1])
    return _Finding(given, count(channels, "channel"), str(wanted), wanted, spatial) if channels != wanted else None


_DIMENSIONS = {
    "BatchNorm1d": (2, 3),
    "BatchNorm2d": (4,),
    "BatchNorm3d": (5,),
    "SyncBatchNorm": (2, 3, 4, 5),
    "InstanceNorm1d": (2, 3),
    "InstanceNorm2d": (3, 4),
    "InstanceNorm3d": (4, 5),
}


def _in_layer(evidence: RaisedEvidence, layer: nn.Module | None) -> _Finding | None:
    """Normalisation layers look at their input in Python before they call anything."""
    dimensions = _DIMENSIONS.get(type(layer).__name__)
    if layer is None or dimensions is None or not type(layer).__module__.startswith("torch."):
        return None
    given = next(
        (
            frame.variables["input"]
            for frame in reversed(evidence.library_frames)
            if frame.module is layer and isinstance(frame.variables.get("input"), torch.Tensor)
        ),
        None,
    )
    if given is None:
        return None
    spatial = dimensions[-1] - 2
    wanted = layer.num_features
    assert isinstance(wanted, int)
    if given.dim() not in dimensions:
        return _Finding(given, count(given.dim(), "dimension"), " or ".join(map(str, dimensions)), wanted, spatial)
    channels = int(given.shape[1 if given.dim() == spatial + 2 or spatial == 1 else 0])
    return _Finding(given, count(channels, "channel"), str(wanted), wanted, spatial) if channels != wanted else None


_RESIZED = {"linear": 3, "bilinear": 4, "bicubic": 4, "trilinear": 5}
_SPATIAL = re.compile(r"_?(?:adaptive_)?(?:max|avg)_pool([123])d(?:_with_indices)?")


def _dimensions(evidence: RaisedEvidence) -> _Finding | None:
    """Pooling and recurrent layers, which have no channels of their own but count the dimensions."""
    for call in evidence.calls:
        pool = _SPATIAL.fullmatch(call.op)
        given = call.get(0, "input")
        if pool is not None and isinstance(given, torch.Tensor):
            spatial = int(pool[1])
            if given.dim() not in (spatial + 1, spatial + 2):
                return _Finding(given, count(given.dim(), "dimension"), f"{spatial + 1} or {spatial + 2}", 0, spatial)
            return None
    frame = evidence.inside("interpolate")
    mode = frame.variables.get("mode") if frame is not None else None
    if frame is not None and mode in _RESIZED and isinstance(given := frame.variables.get("input"), torch.Tensor):
        wanted = _RESIZED[mode]
        if given.dim() != wanted:
            return _Finding(given, count(given.dim(), "dimension"), str(wanted), 0, wanted - 2)
    for frame in reversed(evidence.library_frames):
        given = frame.variables.get("input")
        if isinstance(frame.module, nn.RNNBase) and isinstance(given, torch.Tensor) and given.dim() not in (2, 3):
            return _Finding(given, count(given.dim(), "dimension"), "2 or 3")
    return None


_MESSAGES = (
    (r"expected input\[.*\] to have (\d+) channels, but got (\d+) channels", "{1} channels where it takes {0}"),
    (r"running_mean should contain (\d+) elements not (\d+)", "{0} channels where it takes {1}"),
    (
        r"expected input with shape \[\*,? ?([\d, ]+)\], but got input of size ?\[([\d, ]+)\]",
        "[{1}] where it takes {0}",
    ),
)
_ADVICE = "bring the input to the number of channels that the layer was built for, or rebuild the layer"
