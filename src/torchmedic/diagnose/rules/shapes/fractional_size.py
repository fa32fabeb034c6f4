"""A size that is not an integer was given for a dimension.

What: sizes of tensors and layers are integers. In Python `/` returns a float even if there is no remainder: `8 / 2` is
4.0, and 4.0 is not a valid size.

Why: half a width or the size of a head was computed with `/`, or a number was read from a file or the command line as
text or float.

Cure: divide with `//`, or convert with `int(...)` where the number is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Argument, Call
from torchmedic.source.lookup.origins import origin_of

# Everything that these take, but for a tensor in front and options by name, is a size.
_SIZED = frozenset(
    "view reshape expand repeat zeros ones empty rand randn unflatten split chunk narrow tile new_zeros new_ones "
    "split_with_sizes tensor_split randperm eye".split()
)
# These take other numbers and words, too: what they call a size, or take in second place, is one.
_SIZED_BY_NAME = frozenset(
    "interpolate pad adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d".split()
)


@rule("TM168", "fractional-size")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "TypeError" not in evidence.kinds or not evidence.is_torchs:
        return None
    for call in evidence.calls:
        odd = next(_odd_sizes(evidence, call), None)
        if odd is not None:
            return _diagnosis(evidence, call, odd)
    return None


def _odd_sizes(evidence: RaisedEvidence, call: Call) -> Iterator[Argument]:
    tensors = call.tensors
    if call.op in _SIZED and (
        tensors or str(getattr(call.function, "__module__", "")).startswith("torch") or _native(call)
    ):
        yield from (item for item in call.flat() if item not in tensors and _is_odd(item.value) and _is_size(item))
    elif call.op in _SIZED_BY_NAME and tensors:
        named = [each for each in call.arguments if each.name in ("size", "output_size", "pad")]
        second = [each for each in call.arguments[1:2] if not each.name]
        for size in (named or second)[:1]:
            values = size.value if isinstance(size.value, list | tuple) else (size.value,)
            yield from (Argument(size.node, value) for value in values if isinstance(value, float))
    elif call.op == "index" and evidence.says("slice indices") and len(call.arguments) == 2:
        parts = call.arguments[1].value
        for part in parts if isinstance(parts, tuple) else (parts,):
            if isinstance(part, slice):
                bounds = (part.start, part.stop, part.step)
                yield from (Argument(None, value) for value in bounds if isinstance(value, float))
    elif evidence.says("should be of type int") and call.frame.is_user:
        yield from (item for item in call.arguments if isinstance(item.value, float | str))


def _native(call: Call) -> bool:
    """Whether this is torch's own function of that name: `"a b".split(1.5)` is none of it."""
    return call.function is not None and call.function is getattr(torch, call.op, None)


def _is_odd(value: Any) -> bool:
    return isinstance(value, float | str) and not isinstance(value, bool)


def _is_size(item: Argument) -> bool:
    return item.name in ("", "size", "shape", "sizes", "split_size", "split_size_or_sections") or "[" in item.name


def _diagnosis(evidence: RaisedEvidence, call: Call, odd: Argument) -> Draft:
    # The layer that the user named says more than the `empty` inside it.
    user = evidence.calls[-1]
    given = next(
        (item for item in user.flat() if type(item.value) is type(odd.value) and item.value == odd.value), None
    )
    name = user.op if user.frame.is_user and given is not None else call.op
    kind = "text" if isinstance(odd.value, str) else "a float"
    shown = repr(odd.value)
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`{name}` was given {shown}, {kind}, as a size" if name != "index" else f"a slice ends at {shown}, {kind}"
    )
    draft.cause = "a size is a whole number"
    draft.at(*evidence.at_user_line("cause", f"{shown} is {kind}, not an int"))
    if given is not None and isinstance(given.node, ast.Name | ast.Attribute):
        made = origin_of(evidence.frames, user.frame, given.node)
        draft.at(made.location("origin", f"`{made.name}` becomes {shown} here") if made is not None else None)
    whole = isinstance(odd.value, float) and odd.value.is_integer()
    return draft.help(
        "divide with `//`, which gives an int" if whole else "convert it with `int(...)` where it comes from"
    )
