"""`GradScaler` is called in the wrong order, autocast refuses the loss, or the weights have the wrong dtype.

What: `GradScaler` multiplies the loss so that small gradients do not underflow in float16, divides the gradients again
before the update, and skips updates with overflows. Per update of the weights it requires, in this order:
`scale(loss).backward()`, at most one `unscale_(optimizer)`, `step(optimizer)`, `update()`. The weights must be float32.
Autocast on a GPU refuses `binary_cross_entropy`, whose gradient is too large for float16.

Why: `unscale_` is called twice, `update()` is missing, the parameters of the optimizer have no gradients at all
(`zero_grad()` after backward, other parameters, a loss that does not depend on them), or the model itself was cast to
float16.

Cure: keep the order; leave the weights in float32 and let autocast choose float16 for the operations; pass raw scores
to `binary_cross_entropy_with_logits`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import built_here, dtype, made_here
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import Location
from torchmedic.source.bindings import function_body
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.objects.graph import name_of
from torchmedic.source.objects.living import live_modules
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees


@rule("TM119", "amp-misuse")
def check(evidence: RaisedEvidence) -> Draft | None:
    if evidence.says("unsafe to autocast"):
        return _refused_loss(evidence)
    if not any(frame.file.endswith("grad_scaler.py") for frame in evidence.library_frames):
        return None
    return _repeated(evidence) or _never_scaled(evidence) or _no_gradients(evidence) or _low_precision(evidence)


def _refused_loss(evidence: RaisedEvidence) -> Draft | None:
    """Autocast lets no `binary_cross_entropy` pass: a score of 17 already gives the probability 1 in float16."""
    call = next((call for call in evidence.calls if call.op == "binary_cross_entropy" and call.tensors), None)
    if call is None:
        return None
    given = call.tensors[0].value
    draft = check.draft(evidence, "proven")
    draft.message = "autocast refuses `binary_cross_entropy`: its gradient is too large for float16"
    draft.cause = f"the loss is called in an autocast region with probabilities of {dtype(given)}"
    draft.at(*evidence.at_user_line("cause", "called under autocast"))
    draft.at(made_here(evidence, given, "comes from"))
    if given.grad_fn is None or not name_of(given.grad_fn).startswith("Sigmoid"):
        return draft.help(
            "compute the loss outside of autocast, from float32: `with torch.autocast(..., enabled=False)`"
        )
    layers = [module for module in live_modules() if type(module) is torch.nn.Sigmoid]
    draft.at(built_here(evidence, layers[0], "leave this sigmoid out") if len(layers) == 1 else None)
    draft.because("the probabilities are the result of a sigmoid")
    return draft.help("leave the sigmoid out, and use `BCEWithLogitsLoss` or `binary_cross_entropy_with_logits`")


def _repeated(evidence: RaisedEvidence) -> Draft | None:
    """`unscale_` or `step` twice without `update()` in between."""
    if evidence.says("unscale_() has already been called"):
        name, what = "unscale_", "the gradients of this optimizer have been unscaled already"
    elif evidence.says("unscale_() is being called after step()") or evidence.says("step() has already been called"):
        name, what = "step", "the optimizer has been stepped already"
    else:
        return None
    draft = check.draft(
        evidence, "proven", f"{what} since the last `update()`", "once per update of the weights is allowed"
    )
    draft.at(*evidence.at_user_line("cause", "the second time"))
    frames = [frame for frame in evidence.frames if frame.is_user]
    for frame in frames:
        for node in _calls(frame, name):
            if node.lineno != frame.line:
                draft.at(node_location("origin", frame.file, node, "the first time"))
    if not frames or any(True for frame in frames for _ in _calls(frame, "update")):
        return draft.help(f"call `{name}` once between two calls of `update()`")
    return draft.because("no function that runs calls `update()`").help("call `scaler.update()` after every `step`")


def _never_scaled(evidence: RaisedEvidence) -> Draft | None:
    """`scaler.step(optimizer)` where no loss has gone through `scaler.scale`."""
    if not evidence.says("_scale is None"):
        return None
    plain = [
        (file, call)
        for file, tree in user_trees()
        for call in calls_in(tree, "backward")
        if isinstance(call.func, ast.Attribute) and not call.args and "scale(" not in ast.unparse(call.func)
    ]
    draft = check.draft(evidence, "proven", "the scaler has not scaled any loss")
    draft.cause = "it begins with the first `scale(loss)`, and until then has no factor to divide the gradients by"
    draft.at(node_location("cause", *plain[0], "this loss is not scaled") if len(plain) == 1 else None)
    draft.at(*evidence.at_user_line("surfaced" if draft.has_place else "cause", "the factor is wanted here"))
    return draft.help("call `scaler.scale(loss).backward()` in place of `loss.backward()`")


def _no_gradients(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.says("no inf checks were recorded"):
        return None
    frame = evidence.user_frame
    optimizer = _optimizer(evidence)
    parameters = parameters_of(optimizer) if optimizer else []
    if evidence.says("prior to update"):
        draft = check.draft(evidence, "proven")
        draft.message = "`update()` of the scaler was called, but no optimizer has been stepped through it"
        draft.cause = "the scaler learns from `scaler.step(optimizer)` whether the gradients had overflowed"
        draft.at(*evidence.at_user_line("cause", "nothing to learn from"))
        plain = [node for node in _calls(frame, "step") if not _is_scaler(node)]
        draft.at(*(node_location("origin", frame.file, node, "stepped past the scaler") for node in plain if frame))
        return draft.help("step the optimizer with `scaler.step(optimizer)`")
    none = all(tensor.grad is None for tensor in parameters)
    draft = check.draft(evidence, "proven" if parameters and none else "likely")
    draft.message = "the scaler was to step an optimizer that has no gradients"
    draft.cause = f"none of its {len(parameters)} parameters has a gradient" if none else "no gradient was found"
    cleared = _cleared(frame)
    if cleared is not None:
        draft.at(cleared)
        draft.at(*evidence.at_user_line("surfaced", "no gradient is left here"))
        return draft.help("call `zero_grad()` before backward or after the step, not in between")
    draft.at(*evidence.at_user_line("cause", "this optimizer has no gradients"))
    frozen = sum(not tensor.requires_grad for tensor in parameters)
    draft.because(f"{frozen} of {len(parameters)} parameters have requires_grad=False" if frozen else "")
    return draft.help(
        "check that the loss is computed from the parameters of this optimizer, and that backward was called"
    )


def _low_precision(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.says("attempting to unscale fp16 gradients"):
        return None
    optimizer = _optimizer(evidence)
    parameters = parameters_of(optimizer) if optimizer else []
    half = [tensor for tensor in parameters if tensor.dtype is torch.float16]
    draft = check.draft(evidence, "proven" if half else "likely")
    draft.message = "the weights are float16, which the scaler does not work with"
    draft.cause = f"{len(half)} of {len(parameters)} parameters are float16; the scaler wants float32 weights"
    casts = list(_casts())
    if len(casts) == 1:
        draft.at(node_location("cause", *casts[0], "the weights are cast to float16 here"))
        draft.at(*evidence.at_user_line("surfaced", "their gradients cannot be unscaled"))
    else:
        draft.at(*evidence.at_user_line("cause", "these gradients are float16"))
        draft.at(*(node_location("origin", file, node, "a cast to float16") for file, node in casts[:3]))
    return draft.help("leave the model in float32 and run it under `torch.autocast`")


def _optimizer(evidence: RaisedEvidence) -> Any:
    for frame in reversed(evidence.library_frames):
        optimizer = frame.variables.get("optimizer")
        if hasattr(optimizer, "param_groups"):
            return optimizer
    return None


def _calls(frame: Frame | None, name: str) -> Iterator[ast.Call]:
    """The calls of a method in the function that a frame runs, in order."""
    body = function_body(frame) if frame is not None else None
    found = [node for node in calls_in(body) if isinstance(node.func, ast.Attribute) and node.func.attr == name]
    yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _is_scaler(call: ast.Call) -> bool:
    return bool(call.args)  # `scaler.step(optimizer)`, not `optimizer.step()`


def _cleared(frame: Frame | None) -> Location | None:
    """A `zero_grad()` between backward and the step."""
    if frame is None:
        return None
    before = [node.lineno for node in _calls(frame, "backward") if node.lineno <= frame.line]
    if not before:
        return None
    for node in _calls(frame, "zero_grad"):
        if max(before) < node.lineno <= frame.line:
            return node_location("cause", frame.file, node, "throws away the gradients of this step")
    return None


def _casts() -> Iterator[tuple[str, ast.Call]]:
    """Calls that may cast a model: `.half()`, `.to(torch.float16)`; those of a tensor on the way count too."""
    for file, tree in user_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            values = [*node.args, *(word.value for word in node.keywords)]
            cast = node.func.attr == "half" or (
                node.func.attr == "to"
                and any(ast.unparse(value) in ("torch.float16", "torch.half") for value in values)
            )
            if cast and _is_model(node.func.value):
                yield file, node


def _is_model(owner: ast.expr) -> bool:
    """Whether an expression looks like a model: a name or a constructor, not a batch."""
    text = ast.unparse(owner).lower()
    return not any(
        word in text for word in ("rand", "input", "batch", "image", "x.", "data", "target")
    ) and text not in ("x", "y")
