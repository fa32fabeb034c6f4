"""A normalisation layer in training mode got a single value per channel, which has no variance.

What: in training, batch norm computes the mean and variance of every channel over the batch and the spatial dimensions.
A batch of one sample without spatial dimensions has one value per channel, whose variance is 0.

Why: most often the last batch of an epoch has one sample; or a single sample is evaluated without `model.eval()`.

Cure: use `drop_last=True` for the training loader, `model.eval()` for evaluation, or a layer that does not use batch
statistics (`GroupNorm`, `LayerNorm`).
"""

from __future__ import annotations

import math

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import (
    built_here,
    fed_by,
    incomplete_batch,
    layer_name,
    layer_of,
    made_here,
    shape,
)
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.loader_lines import loader_call


@rule("TM167", "single-value-normalised")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside("batch_norm", "instance_norm")
    given = frame.variables.get("input") if frame is not None else None
    if frame is None or "ValueError" not in evidence.kinds or not isinstance(given, torch.Tensor) or given.dim() < 2:
        return None
    over_batch = frame.function == "batch_norm"
    values = math.prod([*(given.shape[:1] if over_batch else []), *given.shape[2:]])
    if values != 1:
        return None
    layer = layer_of(evidence)
    name = layer_name(evidence, layer) if layer is not None else f"`{frame.function}`"
    draft = check.draft(evidence, "proven")
    draft.message = f"{name} has 1 value per channel to normalise in training"
    draft.cause = f"its input is {shape(given)}: one sample and one point in space leave nothing to take a variance of"
    batch = incomplete_batch(evidence)
    is_last = batch is not None and batch[0] == 1
    loader = loader_call("cause", "its last batch has 1 sample", keyword="batch_size") if is_last else None
    # Under `vmap` each sample comes alone, whatever the batch: another layer is wanted.
    built = built_here(evidence, layer, "takes its statistics over a batch, and `vmap` hands out single samples")
    in_vmap = any(each.function == "vmap_impl" and not each.is_user for each in evidence.frames)
    if built is not None and over_batch and in_vmap:
        draft.at(msgspec.structs.replace(built, role="cause"))
        draft.at(*evidence.at_user_line("surfaced", f"{shape(given)}: 1 value per channel"))
        return draft.help("take a layer that needs no batch: `nn.GroupNorm` or `nn.LayerNorm`")
    draft.at(loader, *evidence.at_user_line("surfaced" if loader else "cause", f"{shape(given)}: 1 value per channel"))
    draft.at(
        made_here(evidence, given, f"becomes {shape(given)}"), built_here(evidence, layer, "the layer is built here")
    )
    draft.because(fed_by(evidence, layer))
    if batch is not None and is_last:
        draft.because(f"this batch has 1 sample, not {batch[1]}: the loader's last batch is not full")
        draft.help("pass `drop_last=True` to the training loader")
    elif over_batch:
        draft.at(loader := loader_call("origin", "the loader is made here", keyword="batch_size"))
        if loader is not None and evidence.incident.batch:
            draft.help("pass `drop_last=True` to the training loader, if its last batch has one sample")
        draft.help("leave out a last batch of one sample; for evaluation call `model.eval()` first")
    else:
        draft.help("normalise before the image has shrunk to one point, or leave this layer out")
    return draft
