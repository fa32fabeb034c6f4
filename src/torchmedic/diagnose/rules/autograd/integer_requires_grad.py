"""`requires_grad` was set on a tensor of integers or booleans.

What: a derivative needs values that can change by a small amount, so only floating-point and complex tensors can
require a gradient. This holds for `requires_grad_()`, for `requires_grad=True` and for `nn.Parameter`.

Why: `torch.tensor([1, 2, 3])` and `torch.arange(10)` are integers because their arguments are.

Cure: write the numbers with a decimal point, pass `dtype=torch.float32`, or call `.float()` first. An index or a mask
that should not be trained is a buffer (`register_buffer`), not a parameter.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.cures.edits import called, rewritten
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import dtype, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Treatment
from torchmedic.replay.step.trial import Edit, edited
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, raising_call, read
from torchmedic.source.spots import spot_of_node


@rule("TM120", "integer-requires-grad")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not (
        evidence.says("only tensors of floating point", "require grad")
        or evidence.says("data set to a tensor that requires gradients must be floating point")
    ):
        return None
    frame = evidence.user_frame
    node, tensor = _subject(frame) if frame is not None else (None, None)
    is_whole = tensor is not None and not (tensor.is_floating_point() or tensor.is_complex())
    text = rewritten(frame.file, node) if frame is not None and node is not None else ""
    name = f"`{text}`" if 0 < len(text) <= 40 else "the tensor"
    draft = check.draft(evidence, "proven" if is_whole else "likely")
    draft.message = (
        f"a gradient was asked for {name}, which holds {dtype(tensor)} values"
        if tensor is not None and is_whole
        else "a gradient was asked for a tensor that does not hold floating-point values"
    )
    draft.cause = "only floating-point and complex tensors can have a gradient"
    draft.at(*evidence.at_user_line("cause", f"{dtype(tensor)} values" if tensor is not None else "not floating-point"))
    if tensor is not None and is_whole:
        draft.at(made_here(evidence, tensor, "is made"))
        draft.because(f"{name} has shape {shape(tensor)} and dtype {dtype(tensor)}")
    converted = _converted(frame, node) if frame is not None and is_whole else None
    draft.treat(converted)
    return draft.help(
        "or keep it without a gradient, as a buffer"
        if converted is not None
        else "make it floating-point (`.float()`), or keep it without a gradient, as a buffer"
    )


def _subject(frame: Frame) -> tuple[ast.expr | None, torch.Tensor | None]:
    """The expression that was to require a gradient, and its value."""
    match frame.statement:
        case ast.Assign(targets=[ast.Attribute(value=owner, attr="requires_grad")]):
            value = read(owner, frame)
            return (owner, value) if isinstance(value, torch.Tensor) else (None, None)
        case ast.Assign(targets=[ast.Attribute(attr="data")], value=given):
            value = read(given, frame)
            return (given, value) if isinstance(value, torch.Tensor) else (None, None)
    call = raising_call(frame)
    for argument in call.tensors if call is not None else ():
        return argument.node, argument.tensor
    node = frame.node
    if isinstance(node, ast.Call):
        # `nn.Parameter(torch.tensor([1, 2]))`: made of constants alone, so that it can be made again.
        for part in (*node.args, node):
            if isinstance(part, ast.Call) and _is_constant(part):
                return part, _made_again(part, frame)
    return None, None


def _is_constant(node: ast.Call) -> bool:
    values = [*node.args, *(word.value for word in node.keywords)]
    return all(
        isinstance(part, _LITERAL) for value in values for part in ast.walk(value) if not isinstance(part, _PASSIVE)
    )


_LITERAL = (ast.Constant, ast.List, ast.Tuple, ast.UnaryOp)
_PASSIVE = (ast.expr_context, ast.operator, ast.unaryop)


def _made_again(node: ast.Call, frame: Frame) -> torch.Tensor | None:
    """The tensor of `torch.tensor([1, 2])`, without the demand for a gradient."""
    function = read(node.func, frame)
    if function is UNKNOWN or function not in (torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full):
        return None
    try:
        words = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        words.pop("requires_grad", None)
        made = function(*[ast.literal_eval(part) for part in node.args], **words)
    except (ValueError, TypeError, RuntimeError):
        return None
    return made if isinstance(made, torch.Tensor) else None


def _converted(frame: Frame, node: ast.expr | None) -> Treatment | None:
    """The conversion as a patch; it cannot be tried, since the code that builds a model is no step."""
    if node is None or not hasattr(node, "lineno") or not isinstance(node, ast.Call | ast.Name | ast.Attribute):
        return None
    if isinstance(frame.statement, ast.Expr) or not isinstance(frame.node, ast.Call):
        return None  # of `x.requires_grad_()` alone, the converted tensor would be lost
    text = f"{called(rewritten(frame.file, node), node)}.float()"
    if isinstance(node, ast.Call) and any(word.arg == "requires_grad" for word in node.keywords):
        text = f"{rewritten(frame.file, node).removesuffix(')')}, dtype=torch.float32)"
    _, patch = edited(Edit(spot_of_node(frame.file, node, frame.function), text))
    return Treatment(title="convert it to floating point", patch=patch)
