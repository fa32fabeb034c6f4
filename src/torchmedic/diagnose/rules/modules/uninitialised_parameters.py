"""Parameters without values were used.

What: a lazy layer (`LazyLinear`, `LazyConv2d`) takes its input size from its first input, and until then its parameters
have no shape. Parameters and buffers on the `meta` device have a shape but no memory.

Why: parameters are counted, initialised or copied before the first forward pass; or a model built under
`torch.device("meta")` was never given memory and weights. A state dict gives no values to buffers that are not in it.

Cure: run one batch through a lazy model first; for a model on `meta`, call `model.to_empty(device=...)` and load
weights.
"""

from __future__ import annotations

import ast
import re

from torch import nn
from torch.nn.parameter import is_lazy

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import layer_name, layer_of, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_nodes
from torchmedic.source.lookup.layers import roots
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees

_OTHERS = re.compile("optim|sched|scaler|loader|sampler", re.I)  # that have a state, and are no modules


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
    if evidence.is_traced:
        return None
    if not held:
        return _meta_buffer(evidence)
    layer = layer_of(evidence)
    subject = layer_name(evidence, layer) if layer is not None else f"`{type(held[0][0]).__name__}`"
    _, name, parameter = held[0]
    draft = check.draft(evidence, "proven")
    draft.message = f"{subject} was used while its parameters are on the `meta` device, without values"
    draft.cause = f"`{name}` has the shape {shape(parameter)} and no memory"
    draft.at(_loaded_in_vain())
    is_loaded = draft.has_place
    draft.at(*evidence.at_user_line("surfaced" if is_loaded else "cause", "its parameters hold no values"))
    count = len({id(item) for _, _, item in held})
    draft.because(f"{count} parameters are on `meta`")
    if is_loaded:
        return draft.help("load the state with `assign=True`: its tensors then take the place of those on `meta`")
    return draft.help("give it memory with `model.to_empty(device=...)`, then load or initialise the weights")


def _loaded_in_vain() -> Location | None:
    """The only line that loads a state into a module: values are copied, and parameters on `meta` take none."""
    found = [
        (file, call)
        for file, tree in user_trees()
        for call in calls_in(tree, "load_state_dict")
        if isinstance(call.func, ast.Attribute) and not _OTHERS.search(ast.unparse(call.func.value))
    ]
    if len(found) != 1 or any(each.arg in ("assign", None) for each in found[0][1].keywords):
        return None
    return node_location("cause", *found[0], "copies values, and parameters on `meta` take none")


def _meta_buffer(evidence: RaisedEvidence) -> Draft | None:
    """A model that was built on `meta` and loaded with `assign=True`: what is not in the state dict stays there."""
    frames = [frame for frame in reversed(evidence.frames) if frame.module is not None]
    held = [
        (module, name)
        for root in [*(frame.module for frame in frames), *roots(evidence.frames)]
        for module in (root.modules() if root is not None else ())
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not held:
        return None
    module, name = held[0]
    saved = name not in module._non_persistent_buffers_set
    draft = check.draft(evidence, "proven")
    draft.message = f"the buffer `{name}` of `{type(module).__name__}` is on the `meta` device, without values"
    draft.cause = "the model was built on `meta`" + (
        "" if saved else ", and a buffer with `persistent=False` is in no state dict that could fill it"
    )
    draft.at(_registered(module, name))
    draft.at(*evidence.at_user_line("surfaced" if draft.has_place else "cause", "used here, without values"))
    return draft.help(
        f"compute `{name}` again after the state is loaded"
        + ("" if saved else ", register it with `persistent=True`,")
        + " or build the model without `meta`"
    )


def _registered(module: nn.Module, name: str) -> Location | None:
    for file, node in class_nodes(type(module)):
        for call in calls_in(node, "register_buffer"):
            if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == name:
                return node_location("cause", file, call, "made on `meta`")
    return None


def _modules_in(evidence: RaisedEvidence) -> list[nn.Module]:
    return [frame.module for frame in reversed(evidence.library_frames) if frame.module is not None]
