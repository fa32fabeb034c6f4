"""`backward()` was called on a tensor with several elements.

What: autograd computes the gradient of one real number. `backward()` and `autograd.grad()` therefore need a loss with
exactly one element, unless they are given a weight for each element (`gradient=`, `grad_outputs=`).

Why: the loss was built with `reduction='none'`, only one dimension was averaged, or the output of the model itself
was passed. Or the loss is a complex number, such as the mean of the squares of complex differences.

Cure: reduce the loss to one number (`loss.mean()` or `loss.sum()`), or pass a weight for each element; take `.abs()` of
complex differences first.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._unfit_loss import UnfitLoss
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Role
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.lookup.handed_loss import Handing, handing_function
from torchmedic.source.lookup.origins import Origin, origin_of, user_argument
from torchmedic.source.returns import code_of
from torchmedic.source.syntax import function_of, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file


@rule("TM101", "backward-on-non-scalar")
def check(evidence: RaisedEvidence) -> Draft | None:
    inner = evidence.inside("grad_and_value_impl")
    if inner is not None and evidence.says("return a scalar tensor"):
        return _function(evidence, inner.variables.get("func"), inner.variables.get("output"))
    inner = evidence.inside("_make_grads")
    if inner is None or "RuntimeError" not in evidence.kinds or not evidence.says("scalar outputs"):
        return None
    loss = inner.variables.get("out")
    if isinstance(loss, torch.Tensor) and loss.is_complex() and loss.numel() == 1:
        return _complex(evidence, loss)
    if not isinstance(loss, torch.Tensor) or loss.numel() == 1:
        return None
    by_grad = evidence.find("grad") is not None
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradient of a tensor with {loss.numel()} elements was asked for; a loss has one element"
    draft.cause = f"the tensor is {shape(loss)}, and nothing says how its elements are to be weighed"
    handing = handing_function(evidence.frames) if evidence.is_in_library else None
    if handing is not None and handing.returns:
        return _handed(draft, evidence, handing, loss)
    computed = UnfitLoss(evidence, loss).unreduced() if not by_grad and not evidence.is_in_library else None
    draft.mark(computed, "cause", f"{loss.numel()} elements, which nothing makes one number of")
    role: Role = "cause" if computed is None else "surfaced"
    draft.at(*evidence.at_user_line(role, f"{shape(loss)}: {loss.numel()} elements, not one"))
    origin = _made(evidence, loss)
    reason = _reason(evidence.user_frame, origin) if origin is not None and evidence.user_frame is not None else ""
    if origin is not None:
        draft.at(origin.location("origin", f"`{origin.name}` becomes {shape(loss)} here{reason}"))
    if loss.numel() == 0:
        draft.because("it has no elements at all: the batch or the selection before it was empty")
    if by_grad:
        draft.help("pass `grad_outputs=torch.ones_like(...)` for the sum of the gradients, or reduce the tensor first")
    else:
        draft.help("reduce the loss to one number with `.mean()` or `.sum()`")
    return draft


def _complex(evidence: RaisedEvidence, loss: torch.Tensor) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradient of a complex number ({str(loss.dtype).removeprefix('torch.')}) was asked for"
    draft.cause = "a loss is a real number: of complex numbers there is no smaller and larger"
    made = UnfitLoss(evidence, loss).made_complex()
    draft.mark(made, "cause", "complex numbers are put together to one, which is complex")
    draft.at(*evidence.at_user_line("cause" if made is None else "surfaced", "backward is called on a complex number"))
    return draft.help("take `.abs()` before the square or the mean, or `torch.view_as_real(...)` of the difference")


def _handed(draft: Draft, evidence: RaisedEvidence, handing: Handing, loss: torch.Tensor) -> Draft:
    """A library calls backward on what a function of the user's returns."""
    last = handing.returns[-1]
    draft.at(node_location("cause", handing.file, last, f"the library takes {shape(loss)} of this for the loss"))
    draft.at(*evidence.at_user_line("surfaced", "backward is called in the library"))
    if isinstance(last.value, ast.Tuple) and handing.function.name == "forward":
        return draft.help("return the loss as the first value: a Trainer takes the first one for the loss")
    return draft.help("return the loss as one number: reduce it with `.mean()` or `.sum()`")


def _function(evidence: RaisedEvidence, function: Any, result: Any) -> Draft | None:
    """`torch.func.grad` of a function that returns more than one number."""
    code = code_of(function) if callable(function) else None
    if not isinstance(result, torch.Tensor) or code is None:
        return None
    node = function_of(syntax_tree(code.co_filename), code)
    returns = (
        [each for each in nodes_in(node) if isinstance(each, ast.Return)] if is_user_file(code.co_filename) else []
    )
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`torch.func.grad` takes a function that returns one number; `{code.co_name}` returns {shape(result)}"
    )
    draft.cause = (
        f"the result of `{code.co_name}` is {shape(result)}, and nothing says how its elements are to be weighed"
    )
    known = len(returns) == 1
    draft.at(node_location("cause", code.co_filename, returns[0], f"returns {shape(result)}") if known else None)
    draft.at(*evidence.at_user_line("surfaced" if known else "cause", "its gradient is asked for here"))
    return draft.help("reduce the result to one number with `.mean()` or `.sum()`, or use `torch.func.jacrev`")


def _made(evidence: RaisedEvidence, loss: torch.Tensor) -> Origin | None:
    passed = user_argument(evidence.frames, loss)
    if passed is not None:
        return origin_of(evidence.frames, passed[0], passed[1].node)
    frame = evidence.user_frame
    if frame is None or not isinstance(frame.node, ast.Call) or not isinstance(frame.node.func, ast.Attribute):
        return None
    # `scaler.scale(loss).backward()`: the name that is scaled.
    scaled = frame.node.func.value
    if isinstance(scaled, ast.Call) and len(scaled.args) == 1 and isinstance(scaled.args[0], ast.Name):
        value = read(scaled.args[0], frame)
        if isinstance(value, torch.Tensor) and value.shape == loss.shape:
            return origin_of(evidence.frames, frame, scaled.args[0])
    return None


def _reason(frame: Frame, origin: Origin) -> str:
    """Whether the loss was told not to reduce: by an argument, or when its module was built."""
    for node in nodes_in(origin.value):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "reduction" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "none":
                return ", with `reduction='none'`"
        module = read(node.func, frame)
        if isinstance(module, torch.nn.Module) and getattr(module, "reduction", None) == "none":
            return f": `{ast.unparse(node.func)}` has `reduction='none'`"
    return ""
