"""A size is not divisible by the number of heads or groups of a layer.

What: attention splits its features evenly over the heads, grouped convolution and group norm split the channels evenly
over the groups, `glu` halves and `pixel_shuffle` divides by a square. None of them accepts a remainder.

Why: a width or a number of heads in a configuration was changed on one side only.

Cure: choose a width that is a multiple of the number of heads or groups.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence

_PAIRS = (
    ("embed_dim", "num_heads"),
    ("in_channels", "groups"),
    ("out_channels", "groups"),
    ("num_channels", "num_groups"),
    ("d_model", "nhead"),
)


@rule("TM177", "indivisible-sizes")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"ValueError", "AssertionError", "RuntimeError"}:
        return None
    frame = evidence.inside("__init__", "multi_head_attention_forward")
    if frame is not None:
        kind = type(frame.module).__name__ if frame.module is not None else "attention"
        for whole, part in _PAIRS:
            size, count = frame.variables.get(whole), frame.variables.get(part)
            if isinstance(size, int) and isinstance(count, int) and count > 0 and size % count:
                return _diagnosis(evidence, f"`{kind}`", f"`{whole}` {size}", f"`{part}` {count}", size, count)
    call = evidence.find("glu", "pixel_shuffle")
    given = call.get(0, "input") if call is not None else None
    if call is None or not isinstance(given, torch.Tensor):
        return None
    if call.op == "glu" and isinstance(along := call.get(1, "dim"), int) and -given.dim() <= along < given.dim():
        size, count = int(given.shape[along]), 2
    elif call.op == "pixel_shuffle" and isinstance(factor := call.get(1, "upscale_factor"), int) and given.dim() > 2:
        size, count = int(given.shape[-3]), factor**2
    else:
        return None
    return _diagnosis(evidence, f"`{call.op}`", f"the size {size}", str(count), size, count) if size % count else None


def _diagnosis(evidence: RaisedEvidence, name: str, whole: str, part: str, size: int, count: int) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"{name}: {whole} is not a multiple of {part}"
    draft.cause = f"{size} = {size // count} x {count} + {size % count}"
    draft.at(*evidence.at_user_line("cause", f"{size} does not divide by {count}"))
    return draft.help(
        f"use {size - size % count or count} or {size + count - size % count} in place of {size}, or another divisor"
    )
