"""Parameters without values were used.

What: a lazy layer (`LazyLinear`, `LazyConv2d`) takes its input size from its first input, and until then its parameters
have no shape. Parameters on the `meta` device have a shape but no memory.

Why: parameters are counted, initialised or copied before the first forward pass; or a model built under
`torch.device("meta")` was never given memory and weights.

Cure: run one batch through a lazy model first; for a model on `meta`, call `model.to_empty(device=...)` and load
weights.
"""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parameter import is_lazy

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import layer_name, layer_of, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.layers import roots


@rule("TM174", "uninitialised-parameters")
def check(evidence: RaisedEvidence) -> Draft | None:
    return _lazy(evidence) or _meta(evidence)


def _owners(evidence: RaisedEvidence) -> list[str]:
    """The live layers that hold parameters without values, by name."""
    return [
        f"`{name or type(root).__name__}`"
        for root in roots(evidence.frames)
        for name, module in root.named_modules()
        if any(held is not None and is_lazy(held) for held in module._parameters.values())
    ]


def _lazy(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.frames[-1] if evidence.frames else None
    if (
        frame is None
        or not evidence.says("uninitialized parameter")
        or not evidence.kinds & {"ValueError", "RuntimeError"}
    ):
        return None
    known = frame.variables
    values = [known.get("self"), *(known.get("args") or ()), *(known.get("kwargs") or {}).values()]
    used = any(is_lazy(value) for value in values)
    owners = _owners(evidence)
    draft = check.draft(evidence, "proven" if used else "likely")
    draft.message = "a parameter of a lazy layer was used before its first input gave it a shape"
    draft.cause = "its layer has not seen an input yet"
    draft.at(*evidence.at_user_line("cause", "this parameter has no shape yet"))
    draft.because(f"without a shape: the parameters of {listed(owners)}" if owners else "")
    return draft.help(
        "run one batch through the model first, under `torch.no_grad()`; then count, initialise or copy parameters"
    )


def _meta(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "NotImplementedError"} or not re.search(r"\bmeta\b", evidence.message):
        return None
    held = [
        (root, name, parameter)
        for root in [*_modules_in(evidence), *roots(evidence.frames)]
        for name, parameter in root.named_parameters()
        if parameter.is_meta
    ]
    if not held or evidence.is_traced:
        return None
    layer = layer_of(evidence)
    subject = layer_name(evidence, layer) if layer is not None else f"`{type(held[0][0]).__name__}`"
    _, name, parameter = held[0]
    draft = check.draft(evidence, "proven")
    draft.message = f"{subject} was used while its parameters are on the `meta` device, without values"
    draft.cause = f"`{name}` has the shape {shape(parameter)} and no memory"
    draft.at(*evidence.at_user_line("cause", "its parameters hold no values"))
    count = len({id(item) for _, _, item in held})
    draft.because(f"{count} parameters are on `meta`")
    return draft.help("give it memory with `model.to_empty(device=...)`, then load or initialise the weights")


def _modules_in(evidence: RaisedEvidence) -> list[nn.Module]:
    return [frame.module for frame in reversed(evidence.library_frames) if frame.module is not None]
