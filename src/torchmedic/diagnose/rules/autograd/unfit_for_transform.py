"""A function that `vmap`, `grad` or another transform of `torch.func` runs does what the transform cannot follow.

What: `vmap` runs a function once for all samples, with tensors that hide the dimension of the samples. `grad`, `vjp`
and the others run it with tensors of their own too. Such tensors have no value that Python can read, no size that
depends on values, and no place in memory that they share with a tensor from outside.

Why: the function reads a value (`.item()`, `if`), selects by a mask, draws random numbers, writes into a tensor that is
made without the samples, updates the statistics of a layer, or calls `backward` itself. Or `in_dims` names an argument
that has no dimension of samples.

Cure: choose with `torch.where`, make new tensors from mapped ones (`x.new_zeros(...)`), give `vmap` a `randomness` or
the layers `eval()`, and give `in_dims` a None for each argument that is the same for all samples.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import layer_name, layer_of, made_here
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_node
from torchmedic.source.returns import code_of
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees

_FOLDER = os.path.join("torch", "_functorch") + os.sep
_MAX_SIZES = 3  # of one argument


class _Refusal(NamedTuple):
    fragments: tuple[str, ...]  # of what torch says, any of them
    what: str
    why: str
    help: str


_REFUSALS = (
    _Refusal(
        ("calling .item() on a Tensor", "data-dependent control flow"),
        "a value is read inside `vmap`, where a tensor stands for all samples at once",
        "the samples have different values, so there is no one number and no one branch",
        "compute both branches and choose with `torch.where(condition, a, b)`, or read the value outside of `vmap`",
    ),
    _Refusal(
        ("batching operators that can support dynamic shape", "batching operators that can output dynamic shape"),
        "the size of a tensor inside `vmap` depends on its values",
        "each sample would have a size of its own, and all samples are in one tensor",
        "keep the size and put a neutral value where the mask is false: `torch.where(mask, x, 0)`",
    ),
    _Refusal(
        ("randomness error mode",),
        "{layer} draws random numbers inside `vmap`, and `vmap` has no `randomness`",
        "samples can share their random numbers or have their own, and `vmap` was told neither",
        "call `vmap(..., randomness='different')`, or `eval()` on the model if nothing shall be random here",
    ),
    _Refusal(
        ("running_mean or running_var", "would mutate a captured Tensor"),
        "{layer} writes to a tensor from outside of the transform",
        "the transform works on tensors of its own, and the tensor from outside cannot take up what they hold",
        "use `GroupNorm`, `track_running_stats=False` or `torch.func.replace_all_batch_norm_modules_` for a layer with "
        "statistics; give any other such tensor to the function as an argument, and return it",
    ),
    _Refusal(
        ("to return a Tensor, got",),
        "the function that `grad` is to differentiate does not return one tensor",
        "a gradient is that of one number; what else the function returns must be announced",
        "return the loss alone, or return `(loss, others)` and call `grad(function, has_aux=True)`",
    ),
    _Refusal(
        ("requires_grad_() (or perhaps using torch.autograd.functional", "backward() called inside a functorch"),
        "gradients are asked for with `requires_grad_` or `backward` inside a transform of `torch.func`",
        "a transform keeps no `.grad`: it returns gradients",
        "take the gradient of a function there: `torch.func.grad(loss)(x)`",
    ),
)


@rule("TM126", "unfit-for-transform")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.is_torchs or not any(_FOLDER in frame.file for frame in evidence.frames):
        return None
    mapped = evidence.inside("vmap_impl")
    if mapped is not None and (evidence.says("mapped dimension") or evidence.says("Got in_dim=")):
        return _in_dims(evidence, mapped.variables)
    if evidence.says("setup_context") or evidence.says("does not have vmap support"):
        return _custom_function(evidence)
    for refusal in _REFUSALS:
        if any(evidence.says(fragment) for fragment in refusal.fragments):
            layer = layer_of(evidence)
            draft = check.draft(evidence, "proven")
            draft.message = refusal.what.format(
                layer=layer_name(evidence, layer) if layer is not None else "an operation"
            )
            draft.cause = refusal.why
            draft.at(*evidence.at_user_line("cause", "inside the transform"))
            return draft.at(_vmap_call("origin")).help(refusal.help)
    return _unmapped(evidence)


def _unmapped(evidence: RaisedEvidence) -> Draft | None:
    """A tensor that is the same for all samples is to hold what differs between them."""
    call = evidence.call
    tensors = [argument for argument in call.tensors if argument.value.numel()] if call is not None else []
    if not tensors or _is_mapped(tensors[0].value):
        return None
    refused = evidence.says("doesn't match the broadcast shape") and any(_is_mapped(each.value) for each in tensors)
    if not refused and not evidence.says("`self` not being vmapped over"):
        return None
    name = tensors[0].text
    message = f"`{name}` is one tensor for all samples of `vmap`, but is given values of each sample"
    draft = check.draft(evidence, "proven", message)
    draft.cause = f"`{name}` has no dimension of samples: it is made without a tensor that `vmap` maps"
    draft.at(*evidence.at_user_line("cause", f"writes to `{name}`"))
    draft.at(made_here(evidence, tensors[0].value, "is made without the samples"))
    return draft.at(_vmap_call("origin")).help(
        "make it from a mapped tensor: `x.new_zeros(...)`, `torch.zeros_like(x)`; or use `torch.stack`"
    )


def _is_mapped(tensor: Any) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def _in_dims(evidence: RaisedEvidence, variables: dict[str, Any]) -> Draft | None:
    """An argument of the mapped function has no dimension of samples, or one of another size."""
    args, dims, function = variables.get("args"), variables.get("in_dims"), variables.get("func")
    if not isinstance(args, tuple):
        return None
    code = code_of(function) if callable(function) else None
    taken = list(code.co_varnames[: code.co_argcount]) if code is not None else []
    names = taken[1:] if inspect.ismethod(function) else taken
    sizes = []
    for at, value in enumerate(args):
        dim = dims[at] if isinstance(dims, tuple) and at < len(dims) else dims
        name = names[at] if at < len(names) else f"argument {at + 1}"
        found = [_size(each, dim) for each in tree_leaves(value)] if isinstance(dim, int) else ["None"]
        sizes.append(f"`{name}` {', '.join(dict.fromkeys(found[:_MAX_SIZES]))}")
    draft = check.draft(evidence, "proven", "`in_dims` of `vmap` does not fit the arguments of the mapped function")
    draft.cause = f"each mapped argument needs one size, the number of samples; there are {'; '.join(sizes)}"
    made = _vmap_call("cause")
    draft.at(made, *evidence.at_user_line("cause" if made is None else "surfaced", "called here"))
    return draft.help(
        "give `in_dims` one entry for each argument: 0 if it has samples, None if it is the same for all of them"
    )


def _size(value: Any, dim: int) -> str:
    if not isinstance(value, torch.Tensor):
        return f"no tensor ({type(value).__name__})"
    return str(value.shape[dim]) if -value.dim() <= dim < value.dim() else "no such dimension"


def _custom_function(evidence: RaisedEvidence) -> Draft | None:
    held = (value for frame in reversed(evidence.frames) for value in frame.variables.values())
    kind = next((value for value in held if isinstance(value, type) and issubclass(value, Function)), None)
    written = class_node(kind) if kind is not None else None
    if kind is None or written is None:
        return None
    for_vmap = evidence.says("vmap support")
    lacks = "no rule for `vmap`" if for_vmap else "no `setup_context`"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{kind.__name__}` has {lacks}, and is used inside a transform of `torch.func`"
    draft.cause = "a transform runs `forward` without `ctx`, and asks the class for the rest"
    draft.at(node_location("cause", *written, lacks))
    draft.at(*evidence.at_user_line("surfaced", "used here"))
    if for_vmap:
        return draft.help("add `generate_vmap_rule = True` to the class, or a static method `vmap`")
    return draft.help("take `ctx` out of `forward`, and save tensors in `setup_context(ctx, inputs, output)` instead")


def _vmap_call(role: Role) -> Location | None:
    """Where the user calls `vmap`, if there is one such place."""
    found = [(file, call) for file, tree in user_trees() for call in calls_in(tree, "vmap")]
    return node_location(role, *found[0], "mapped over the samples here") if len(found) == 1 else None
