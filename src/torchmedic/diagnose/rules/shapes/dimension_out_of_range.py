"""A dimension was used that the tensor does not have.

What: `dim=`, `transpose`, `permute`, `x.shape[2]`, `x[:, :, 0]` and `b, c, h, w = x.shape` all need a certain number of
dimensions. This tensor has fewer, or more.

Why: a batch or channel dimension is missing, a dimension was flattened or squeezed away (for example in a batch of one
sample), or a loss that is already one number is indexed.

Cure: find the line where the tensor lost or gained a dimension; use `squeeze(1)` instead of `squeeze()`, and a negative
`dim` for the last dimensions.
"""

from __future__ import annotations

import ast
import re

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Call, read
from torchmedic.source.lookup.origins import origin_of


@rule("TM163", "dimension-out-of-range")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.is_torchs:
        return None
    return _named(evidence) or _indexed(evidence) or _unpacked(evidence) or _without_dimensions(evidence)


def _draft(evidence: RaisedEvidence, tensor: torch.Tensor, message: str, why: str) -> Draft:
    draft = check.draft(
        evidence, "proven", message, f"the tensor is {shape(tensor)}: {count(tensor.dim(), 'dimension')}"
    )
    draft.at(*evidence.at_user_line("cause", why))
    draft.at(made_here(evidence, tensor, f"becomes {shape(tensor)}"))
    return draft


def _finish(draft: Draft) -> Draft:
    return draft.help(
        "see where the tensor got this shape: a batch or channel dimension may be missing or squeezed away"
    )


def _named(evidence: RaisedEvidence) -> Draft | None:
    """`dim=2` of a matrix; `permute` with more or fewer numbers than dimensions."""
    wrong = re.search(r"Dimension out of range .*but got (-?\d+)\)", evidence.message)
    counts = evidence.says("number of dimensions", "desired ordering")
    if wrong is None and not counts:
        return None
    call = next((call for call in evidence.calls if call.tensors), None)
    if call is None:
        call_or_none = evidence.call
        op = f"`{call_or_none.op}`" if call_or_none is not None else "an operation"
        what = f"dimension {wrong[1]}" if wrong else "another number of dimensions"
        draft = check.draft(
            evidence, "likely", f"{op} was asked for {what}, which the tensor does not have", evidence.message[:200]
        )
        draft.at(*evidence.at_user_line("cause", "no such dimension"))
        return _finish(draft)
    tensor = call.tensors[0].value
    dims = count(tensor.dim(), "dimension")
    if wrong is None:
        given = _permuted(call)
        message = f"`{call.op}` was given {given} dimensions of a tensor that has {tensor.dim()}"
        return _finish(_draft(evidence, tensor, message, f"{given} named, {tensor.dim()} there"))
    dim = int(wrong[1])
    room = tensor.dim() + (call.op in ("stack", "unsqueeze"))
    if -room <= dim < max(room, 1):
        return None
    message = f"`{call.op}` was asked for dimension {dim} of a tensor that has {dims}"
    return _finish(_draft(evidence, tensor, message, f"{shape(tensor)} has no dimension {dim}"))


def _permuted(call: Call) -> int:
    rest = [argument.value for argument in call.arguments[1:]]
    return len(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else len(rest)


def _indexed(evidence: RaisedEvidence) -> Draft | None:
    """`x.shape[2]` and `x[:, :, 0]` of a matrix."""
    call = evidence.call
    if "IndexError" not in evidence.kinds or call is None or call.op not in ("index", "index_put_"):
        return None
    owner, index = call.arguments[0], call.arguments[1].value
    if (
        isinstance(owner.value, torch.Size)
        and isinstance(index, int)
        and not -len(owner.value) <= index < len(owner.value)
    ):
        sizes = list(owner.value)
        message = f"size {index} of a shape with {count(len(sizes), 'size')} was asked for"
        draft = check.draft(evidence, "proven", message, f"the shape is {sizes}")
        draft.at(*evidence.at_user_line("cause", f"{sizes} has no number {index}"))
        if owner.node is not None and isinstance(owner.node, ast.Attribute | ast.Call):
            node = owner.node.func if isinstance(owner.node, ast.Call) else owner.node
            holder = node.value if isinstance(node, ast.Attribute) else None
            made = origin_of(evidence.frames, call.frame, holder)
            draft.at(made.location("origin", f"`{made.name}` becomes {sizes} here") if made is not None else None)
        return _finish(draft)
    tensor = owner.tensor
    if tensor is None or not (evidence.says("indices for tensor") or evidence.says("0-dim")):
        return None
    parts = index if isinstance(index, tuple) else (index,)
    used = sum(
        part.dim() if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    if used <= tensor.dim():
        return None
    indices = "1 index" if used == 1 else f"{used} indices"
    message = f"{indices} for a tensor that has {count(tensor.dim(), 'dimension')}"
    return _finish(_draft(evidence, tensor, message, f"{shape(tensor)} takes {tensor.dim()} at most"))


def _unpacked(evidence: RaisedEvidence) -> Draft | None:
    """`b, c, h, w = x.shape`."""
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is None or "ValueError" not in evidence.kinds or not evidence.says("values to unpack"):
        return None
    statement = frame.statement
    if not isinstance(statement, ast.Assign) or not isinstance(frame.node, ast.Tuple | ast.List):
        return None
    value = read(statement.value, frame)
    names = len(frame.node.elts)
    if not isinstance(value, torch.Size) or len(value) == names:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"a shape with {count(len(value), 'size')} was taken apart into {names} names"
    draft.cause = f"the shape is {list(value)}"
    draft.at(*evidence.at_user_line("cause", f"{list(value)} has {len(value)}, not {names}"))
    holder = statement.value
    holder = holder.func if isinstance(holder, ast.Call) else holder
    if isinstance(holder, ast.Attribute):
        made = origin_of(evidence.frames, frame, holder.value)
        draft.at(made.location("origin", f"`{made.name}` becomes {list(value)} here") if made is not None else None)
    return _finish(draft)


def _without_dimensions(evidence: RaisedEvidence) -> Draft | None:
    """`len()` and `for` over a tensor that is one number."""
    frame = evidence.inside("__len__", "__iter__")
    tensor = frame.variables.get("self") if frame is not None else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() or not evidence.says("0-d tensor"):
        return None
    verb = "counted" if frame is not None and frame.function == "__len__" else "looped over"
    message = f"a tensor that is one number, without dimensions, was {verb}"
    return _finish(_draft(evidence, tensor, message, "one number, no dimensions"))
