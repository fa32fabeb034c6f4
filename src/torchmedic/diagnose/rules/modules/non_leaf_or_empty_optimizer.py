"""An optimizer was given no parameters, or tensors that it cannot optimise.

What: an optimizer takes leaf tensors: parameters that are not the result of a computation. It needs at least one, each
only once, and most optimizers need dense gradients.

Why: layers stored in a plain Python list (only `nn.ModuleList` registers them), a `model.parameters()` generator that a
loop has already exhausted, all layers frozen, `torch.randn(..., requires_grad=True) * 0.1` or `.to(device)`, which
compute a new tensor, a forgotten `()`, or an embedding with `sparse=True`.

Cure: see the note of the diagnosis; for computed tensors, scale or move the tensor first and call `requires_grad_()`
last.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.failing_call import UNKNOWN, raising_call, read
from torchmedic.source.lookup.layers import roots
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.syntax import nodes_in


@rule("TM176", "non-leaf-or-empty-optimizer")
def check(evidence: RaisedEvidence) -> Draft | None:
    optimizer = next(
        (found for frame in evidence.library_frames if (found := _optimizer(frame.variables)) is not None), None
    )
    if optimizer is None or not evidence.kinds & {"ValueError", "TypeError", "RuntimeError"}:
        return None
    return (
        _empty(evidence, optimizer)
        or _computed(evidence, optimizer)
        or _wrong_kind(evidence, optimizer)
        or _twice(evidence, optimizer)
        or _sparse(evidence, optimizer)
    )


def _optimizer(variables: dict[str, Any]) -> torch.optim.Optimizer | None:
    owner = variables.get("self")
    return owner if isinstance(owner, torch.optim.Optimizer) else None


def _draft(evidence: RaisedEvidence, message: str, cause: str, label: str) -> Draft:
    draft = check.draft(evidence, "proven", message, cause)
    draft.at(*evidence.at_user_line("cause", label))
    return draft


def _empty(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer) -> Draft | None:
    frame = evidence.inside("__init__")
    if frame is None or frame.variables.get("param_groups") != [] or not evidence.says("empty parameter list"):
        return None
    draft = _draft(
        evidence, f"`{type(optimizer).__name__}` was given no parameters", "the list is empty", "no parameters"
    )
    owner = _asked(evidence)
    if owner is None:
        call = raising_call(evidence.user_frame) if evidence.user_frame is not None else None
        given = call.get(0, "params") if call is not None else UNKNOWN
        if given is not UNKNOWN and not isinstance(given, list | tuple):
            draft.at(made_here(evidence, given, "is made"))
            draft.because("it can be gone through once only: whatever counted or listed it before has used it up")
            draft.help("call `model.parameters()` anew here, or keep `list(model.parameters())`")
        else:
            draft.help("pass the parameters of the model: `model.parameters()`")
        return draft
    hidden = list(_unregistered(owner))
    total = sum(1 for _ in owner.parameters())
    if hidden:
        name, count = hidden[0]
        draft.because(
            f"`{type(owner).__name__}.{name}` holds {count} modules in a plain Python container, which hides them"
        )
        for file, statement in attribute_assignments(type(owner), name):
            draft.at(node_location("origin", file, statement, "layers in here are not registered"))
        draft.help(f"make `{name}` an `nn.ModuleList` or `nn.ModuleDict`")
    elif total:
        frozen = sum(not parameter.requires_grad for parameter in owner.parameters())
        draft.because(f"`{type(owner).__name__}` has {total} parameters, {frozen} of them with `requires_grad=False`")
        draft.help("leave the layers that are to be trained unfrozen, or change the filter")
    else:
        draft.because(f"`{type(owner).__name__}` has no parameters at all")
        draft.help("assign layers to `self` in `__init__`, so that they are registered")
    return draft


def _asked(evidence: RaisedEvidence) -> nn.Module | None:
    """The module whose `parameters()` the user's line asks for."""
    frame = evidence.user_frame
    for node in nodes_in(frame.node if frame is not None else None):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters") and frame is not None:
            owner = read(node.value, frame)
            if isinstance(owner, nn.Module):
                return owner
    return None


def _unregistered(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in module.__dict__.items():
        items = list(value.values()) if isinstance(value, dict) else value
        if name.startswith("_") or not isinstance(items, list | tuple):
            continue
        count = sum(isinstance(item, nn.Module | nn.Parameter) for item in items)
        if count:
            yield name, count


def _computed(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer) -> Draft | None:
    frame = evidence.inside("add_param_group")
    tensor = frame.variables.get("param") if frame is not None else None
    if not isinstance(tensor, torch.Tensor) or tensor.is_leaf or tensor.retains_grad:
        return None
    made_by = type(tensor.grad_fn).__name__.removesuffix("0").removesuffix("Backward")
    draft = _draft(
        evidence,
        f"`{type(optimizer).__name__}` was given a tensor that was computed, not a parameter",
        f"the tensor {shape(tensor)} is the result of `{made_by}`, so it gets no gradient of its own",
        f"{shape(tensor)} is the result of `{made_by}`",
    )
    draft.at(made_here(evidence, tensor, "is computed"))
    draft.help("compute first and call `.detach().requires_grad_()` last, or wrap the result in `nn.Parameter`")
    return draft


def _wrong_kind(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer) -> Draft | None:
    if "TypeError" not in evidence.kinds:
        return None
    name = type(optimizer).__name__
    inner = evidence.inside("add_param_group", "__init__")
    if inner is None:
        return None
    given = inner.variables.get("param") if inner.function == "add_param_group" else inner.variables.get("params")
    if isinstance(given, torch.Tensor):
        draft = _draft(
            evidence, f"`{name}` was given one tensor, not a list of them", "it takes a list", "a single tensor"
        )
        draft.help("put it into a list: `[tensor]`")
    elif isinstance(given, nn.Module):
        kind = type(given).__name__
        draft = _draft(
            evidence, f"`{name}` was given a module, `{kind}`", "it takes parameters", f"`{kind}` is a module"
        )
        draft.help("pass its parameters: `module.parameters()`")
    elif callable(given):
        draft = _draft(evidence, f"`{name}` was given a method, not what it returns", "it is not called", "not called")
        draft.help("call it: `model.parameters()`")
    elif inner.function == "add_param_group" and given is not None:
        kind = type(given).__name__
        draft = _draft(evidence, f"`{name}` was given a {kind} among its parameters", "it takes tensors", f"a {kind}")
        draft.help("pass tensors: `model.parameters()`; with names, `(name, tensor)` for all of them")
    else:
        return None
    return draft


def _twice(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer) -> Draft | None:
    frame = evidence.inside("add_param_group")
    group = frame.variables.get("param_group") if frame is not None else None
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, list):
        return None
    known = set(map(id, parameters_of(optimizer)))
    twice = [item for item in params if id(item) in known]
    if not twice:
        return None
    draft = _draft(
        evidence,
        f"`{type(optimizer).__name__}` was given {len(twice)} parameters in more than one group",
        f"the first of them is {shape(twice[0])}",
        f"{len(twice)} parameters in two groups",
    )
    draft.help("leave in each group only what no other group has")
    return draft


def _sparse(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer) -> Draft | None:
    found = [
        parameter
        for group in getattr(optimizer, "param_groups", [])
        for parameter in group["params"]
        if parameter.grad is not None and parameter.grad.is_sparse
    ]
    if not found or not evidence.says("sparse gradient"):
        return None
    owner = next(
        (
            f"`{name or type(module).__name__}` ({type(module).__name__}, `sparse=True`)"
            for root in roots(evidence.frames)
            for name, module in root.named_modules()
            if any(held is found[0] for held in module._parameters.values())
        ),
        f"the parameter {shape(found[0])}",
    )
    name = type(optimizer).__name__
    draft = _draft(
        evidence,
        f"`{name}` cannot use the sparse gradient of {owner}",
        f"{len(found)} of its parameters have a sparse gradient",
        "a sparse gradient",
    )
    draft.help("build the embedding with `sparse=False`, or use `torch.optim.SparseAdam` or `SGD` for it")
    return draft
