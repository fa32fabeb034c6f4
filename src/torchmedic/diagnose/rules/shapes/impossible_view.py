"""A tensor cannot be viewed in the requested shape.

What: `view` and `reshape` keep every element, so the product of the sizes must equal the number of elements. In
addition, `view` never copies: after `transpose`, `permute` or `expand` the elements are no longer in the order that
`view` needs.

Why: a batch size or a number of features written as a constant (the last batch of an epoch is often smaller), a layer
whose output size was computed wrongly by hand, `view` after a transpose.

Cure: take the batch size from the tensor (`x.size(0)`) and let torch compute one size (`-1`); after a transpose use
`reshape`.
"""

from __future__ import annotations

import ast
import math

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._shapes import by_message
from torchmedic.diagnose.words.tensors import argument_text, count, incomplete_batch, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Argument, Call, read

_VIEWS = ("view", "reshape", "view_as", "reshape_as", "_unsafe_view")


@rule("TM155", "impossible-view")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds:
        return None
    call = evidence.find(*_VIEWS)
    found = _view(evidence, call) if call is not None else None
    found = found or _unflatten(evidence)
    return found or by_message(check, evidence, _MESSAGES, "a view that is not possible: {}", _ADVICE)


def _view(evidence: RaisedEvidence, call: Call) -> Draft | None:
    source = call.argument(0, "input")
    wanted = _sizes(call)
    if source is None or source.tensor is None or wanted is None:
        return None
    total = source.value.numel()
    known = math.prod(size for size in wanted if size != -1)
    name = f"`{call.op}` to {wanted}"
    if wanted.count(-1) > 1:
        return _done(
            evidence, source, f"{name}: only one size can be left open", f"{wanted} leaves several sizes open", ""
        )
    if -1 in wanted and (known == 0 or total % known):
        why = f"{total} elements cannot be divided by {known}"
        return _counted(evidence, call, source, wanted, f"{name}: {why}", why)
    if -1 not in wanted and known != total:
        why = f"{' x '.join(map(str, wanted)) or '1'} = {known} elements, and the tensor has {total}"
        return _counted(evidence, call, source, wanted, f"{name} needs {why}", why)
    if call.op in ("view", "view_as") and not source.value.is_contiguous():
        why = f"strides {list(source.value.stride())} of {shape(source.value)}: its elements are not in order"
        text = f"{name} of a tensor whose memory is not contiguous"
        return _done(
            evidence, source, text, why, "use `reshape`, which copies where it must, or call `contiguous()` first"
        )
    return None


def _sizes(call: Call) -> list[int] | None:
    rest = [argument.value for argument in call.arguments[1:]]
    if call.op.endswith("_as"):
        return list(rest[0].shape) if rest and isinstance(rest[0], torch.Tensor) else None
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    return [int(size) for size in sizes] if all(type(size) is int for size in sizes) and sizes else None


def _counted(
    evidence: RaisedEvidence, call: Call, source: Argument, wanted: list[int], message: str, why: str
) -> Draft:
    """The reason, if a division with a remainder or a batch that is not full explains the difference."""
    total = source.value.numel()
    fact = ""
    help_text = "compute the sizes from the tensor (`x.size(0)`), and let the rest be found with `-1`"
    batch = incomplete_batch(evidence)
    divided = _with_remainder(call)
    sizes = list(source.value.shape)
    if divided:
        fact, help_text = divided, "choose a divisor that divides the size without a remainder"
    elif batch is not None and batch[1] in wanted:
        have, full = batch
        shrunk = [have if size == full else size for size in wanted]
        if _fits(shrunk, total):
            fact = f"this batch has {count(have, 'sample')}, not {full}: the loader's last batch is not full"
            help_text = f"take the batch size from the tensor instead of {full}, or pass `drop_last=True` to the loader"
    elif sizes and wanted[0] not in (-1, sizes[0]) and _fits([sizes[0], *wanted[1:]], total):
        fact = f"with the tensor's own first size, {sizes[0]}, in place of {wanted[0]} it would fit"
        help_text = "take the first size from the tensor: `x.size(0)`"
    return _done(evidence, source, message, why, help_text, fact)


def _with_remainder(call: Call) -> str:
    """The sizes of a call that are written as a division which leaves a remainder: `C // heads`."""
    for argument in call.arguments[1:]:
        match argument.node:
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                size, by = read(left, call.frame), read(right, call.frame)
                if type(size) is int and type(by) is int and by and size % by:
                    return f"`{ast.unparse(argument.node)}` is {size} // {by}: {size} is not a multiple of {by}"
    return ""


def _fits(sizes: list[int], total: int) -> bool:
    known = math.prod(size for size in sizes if size != -1)
    return known == total if -1 not in sizes else known != 0 and total % known == 0


def _unflatten(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside("unflatten")
    if frame is None:
        return None
    source, along, wanted = (frame.variables.get(name) for name in ("self", "dim", "sizes"))
    if not isinstance(source, torch.Tensor) or not isinstance(along, int) or not isinstance(wanted, list | tuple):
        return None
    sizes = list(wanted)
    if not sizes or not all(type(size) is int for size in sizes) or not -source.dim() <= along < source.dim():
        return None
    total = int(source.shape[along])
    if _fits(sizes, total):
        return None
    why = f"dimension {along} has {total}, and {' x '.join(map(str, sizes))} = {math.prod(sizes)}"
    return _done(
        evidence,
        Argument(None, source),
        f"`unflatten` to {sizes}: {why}",
        why,
        "make the sizes multiply up to that number",
    )


def _done(evidence: RaisedEvidence, source: Argument, message: str, why: str, help_text: str, fact: str = "") -> Draft:
    draft = check.draft(evidence, "proven", message, f"the tensor is {argument_text(source)}; {why}")
    draft.at(*evidence.at_user_line("cause", why))
    draft.at(made_here(evidence, source.value, f"becomes {shape(source.value)}"))
    draft.because(fact)
    return draft.help(help_text or "leave one size open at most, and name the others")


_MESSAGES = (
    (r"shape '(\[[-\d, ]*\])' is invalid for input of size (\d+)", "{1} elements cannot be seen as {0}"),
    (r"view size is not compatible with input tensor's size and stride", "the tensor's memory is not contiguous"),
    (r"only one dimension can be inferred", "more than one size is left open"),
    (r"Cannot view a tensor with shape (.*) and strides (.*) as a tensor with shape (.*?)[!.]?$", "{0} as {2}"),
)
_ADVICE = "compute the sizes from the tensor (`x.size(0)`, `-1`); after a transpose use `reshape`"
