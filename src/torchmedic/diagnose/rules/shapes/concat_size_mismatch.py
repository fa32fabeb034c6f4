"""The tensors to be joined differ in a dimension other than the one along which they are joined.

What: `cat` joins tensors along one dimension; in all other dimensions their sizes must be equal. `stack` adds a
dimension, so all shapes must be equal. Both need at least one tensor.

Why: a skip connection whose branch was rounded to another size by a stride or pooling, sequences of different length,
the wrong `dim`, or a list that was never filled.

Cure: crop or pad the tensor that differs, join along another dimension, or find out why the list is empty.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._shapes import in_our_words
from torchmedic.diagnose.words.tensors import argument_text, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import UNKNOWN, Argument, Call, raising_call

_ALONG = {"hstack": 1, "column_stack": 1, "vstack": 0, "row_stack": 0, "dstack": 2}
_JOINS = ("cat", "concat", "concatenate", "stack", *_ALONG)


@rule("TM154", "concat-size-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError"} or _is_collating(evidence):
        return None
    call = evidence.find(*_JOINS)
    if call is None or not call.arguments:
        return _from_message(evidence)
    first = call.argument(0, "tensors")
    if first is not None and isinstance(first.value, list | tuple) and not first.value:
        return _empty(evidence, call, first)
    found = _odd_one(call, first) if first is not None else None
    return _mismatch(evidence, call, *found) if found is not None else _from_message(evidence)


def _is_collating(evidence: RaisedEvidence) -> bool:
    """Samples of a batch that differ are a matter of the dataset, with a rule of its own."""
    for frame in evidence.frames:
        call = raising_call(frame) if frame.function == "fetch" and not frame.is_user else None
        if call is not None and call.op in ("collate_fn", "default_collate"):
            return True
        if frame.function in ("default_collate", "collate_tensor_fn") and not frame.is_user:
            return True
    return not evidence.is_torchs


def _odd_one(call: Call, listed: Argument) -> tuple[Argument, Argument, int, int | None] | None:
    """The first tensor, the first that does not fit it, its position, and the dimension in which it differs."""
    members = list(Call(call.frame, call.op, None, [listed]).flat())
    if not members or members[0].tensor is None:
        return None
    along = call.get(1, "dim") if call.op not in _ALONG else _ALONG[call.op]
    along = 0 if along is UNKNOWN else along
    if call.op in ("hstack", "column_stack") and members[0].value.dim() == 1:
        along = 0 if call.op == "hstack" else 1
    head = members[0]
    for position, member in enumerate(members[1:], 1):
        if member.tensor is None:
            return None
        a, b = _sizes(call.op, head.value), _sizes(call.op, member.value)
        if call.op in ("cat", "concat", "concatenate") and [0] in (a, b):
            continue  # a tensor of no elements may always be joined
        if len(a) != len(b):
            return head, member, position, None
        for dimension, (one, other) in enumerate(zip(a, b, strict=True)):
            joined = call.op != "stack" and isinstance(along, int) and dimension == along % max(len(a), 1)
            if one != other and not joined:
                return head, member, position, dimension
    return None


def _sizes(op: str, tensor: torch.Tensor) -> list[int]:
    sizes = list(tensor.shape)
    if op in ("vstack", "row_stack") and len(sizes) < 2:
        return [1, *sizes] if sizes else [1, 1]
    if op == "column_stack" and len(sizes) < 2:
        return [*sizes, 1] if sizes else [1, 1]
    if op == "dstack" and len(sizes) < 3:
        return [*([1] if len(sizes) < 2 else []), *sizes, 1]
    return sizes


def _mismatch(
    evidence: RaisedEvidence, call: Call, head: Argument, odd: Argument, position: int, dimension: int | None
) -> Draft:
    a, b = head.value, odd.value
    if dimension is None:
        why = f"tensor 0 has {a.dim()} dimensions and tensor {position} has {b.dim()}"
    else:
        one, other = _sizes(call.op, a)[dimension], _sizes(call.op, b)[dimension]
        why = f"dimension {dimension} is {one} in tensor 0 and {other} in tensor {position}"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{call.op}` of tensors that differ: {why}"
    draft.cause = f"tensor 0 is {argument_text(head)}, tensor {position} is {argument_text(odd)}"
    draft.at(*evidence.at_user_line("cause", why))
    for side in (b, a):
        draft.at(made_here(evidence, side, f"becomes {shape(side)}"))
    if dimension is not None and call.op != "stack" and a.dim() == b.dim() and _fits_along(a, b, dimension):
        draft.help(f"crop or pad one of them, or, if that is what is meant, join along dimension {dimension}")
    else:
        draft.help("crop, pad or reshape the tensor that differs before they are joined")
    return draft


def _fits_along(a: torch.Tensor, b: torch.Tensor, dimension: int) -> bool:
    return all(one == other for at, (one, other) in enumerate(zip(a.shape, b.shape, strict=True)) if at != dimension)


def _empty(evidence: RaisedEvidence, call: Call, listed: Argument) -> Draft:
    draft = check.draft(evidence, "proven", f"`{call.op}` of an empty list", f"`{listed.text}` holds no tensor")
    draft.at(*evidence.at_user_line("cause", f"`{listed.text}` is empty"))
    draft.at(made_here(evidence, listed.value, "is made"))
    return draft.help("see why nothing was added to it: a loop that never ran, a filter that let nothing through")


_MESSAGES = (
    (r"must match except in dimension (\d+). Expected size (\d+) but got size (\d+) for tensor number (\d+)",
     "one has {1} where tensor {3} has {2}, in a dimension other than {0}"),
    (r"must have same number of dimensions: got (\d+) and (\d+)", "one has {0} dimensions, another {1}"),
    (r"equal size, but got (\[[\d, ]*\]) at entry (\d+) and (\[[\d, ]*\]) at entry (\d+)",
     "tensor {1} is {0} and tensor {3} is {2}"),
    (r"expected a non-empty (?:list of Tensors|TensorList)|expects a non-empty TensorList", "there are none"),
)  # fmt: skip


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    why = in_our_words(evidence, _MESSAGES)
    if why is None:
        return None
    draft = check.draft(evidence, "likely", f"tensors that cannot be joined: {why}", f"torch names the sizes: {why}")
    draft.at(*evidence.at_user_line("cause", why))
    return draft.help("crop, pad or reshape the tensor that differs before they are joined")
