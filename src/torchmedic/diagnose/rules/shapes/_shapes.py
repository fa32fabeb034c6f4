"""The arithmetic of shapes, and what torch's messages say of it: broadcasting, matrix products, why they fail."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import msgspec

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Argument, Call

Shape = Sequence[int]


def broadcast_clash(shapes: Sequence[Shape]) -> tuple[int, int, int] | None:
    """The last dimension, counted from the end as -1, in which shapes do not broadcast, with two sizes that differ."""
    for back in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = [shape[-back] for shape in shapes if len(shape) >= back and shape[-back] != 1]
        odd = next((size for size in sizes if size != sizes[0]), None)
        if odd is not None:
            return -back, sizes[0], odd
    return None


class Clash(msgspec.Struct, frozen=True):
    """Why two operands cannot be multiplied. `given` and `wanted` are the sizes that differ, where sizes do."""

    left: Argument
    right: Argument
    why: str
    given: int = 0
    wanted: int = 0
    transposed_fits: bool = False


# Where the operands stand, whether the right one is stored transposed, and how many dimensions each must have.
_PRODUCTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], tuple[int, int] | None]] = {
    "linear": (0, ("input",), ("weight",), None),
    "matmul": (0, ("input", "self"), ("other", "tensor2"), None),
    "mm": (0, ("input", "self"), ("mat2",), (2, 2)),
    "bmm": (0, ("input", "self"), ("mat2",), (3, 3)),
    "mv": (0, ("input", "self"), ("vec",), (2, 1)),
    "dot": (0, ("input", "self"), ("tensor", "other"), (1, 1)),
    "vdot": (0, ("input", "self"), ("other",), (1, 1)),
    "addmm": (1, ("mat1",), ("mat2",), (2, 2)),
    "addmv": (1, ("mat",), ("vec",), (2, 1)),
    "baddbmm": (1, ("batch1",), ("batch2",), (3, 3)),
    "addbmm": (1, ("batch1",), ("batch2",), (3, 3)),
}
PRODUCTS = frozenset(_PRODUCTS) | {
    *(f"{op}_" for op in _PRODUCTS),
    *"bilinear tensordot linalg_multi_dot multi_dot chain_matmul einsum scaled_dot_product_attention".split(),
}


def product_clash(call: Call) -> Clash | None:
    """Why the operands of a matrix product cannot be multiplied; None if they can or are not known."""
    op = call.op.rstrip("_")
    match op:
        case "einsum":
            return _einsum(call)
        case "bilinear":
            return _bilinear(call)
        case "tensordot":
            return _tensordot(call)
        case "scaled_dot_product_attention":
            return _attention(call)
        case "linalg_multi_dot" | "multi_dot" | "chain_matmul":
            return _chain(call)
    start, left_names, right_names, dims = _PRODUCTS[op]
    left, right = _operand(call, start, left_names), _operand(call, start + 1, right_names)
    if left is None or right is None:
        return None
    if dims is not None:
        for side, expected in ((left, dims[0]), (right, dims[1])):
            if side.value.dim() != expected:
                why = f"`{op}` takes {expected} dimensions here, and {list(side.value.shape)} has {side.value.dim()}"
                return Clash(left, right, why)
    return pair_clash(left, right, transposed=op == "linear")


def _operand(call: Call, position: int, names: tuple[str, ...]) -> Argument | None:
    for name in names:
        found = call.argument(position, name)
        if found is not None and found.tensor is not None:
            return found
    return None


def pair_clash(left: Argument, right: Argument, *, transposed: bool = False) -> Clash | None:
    """Inner sizes first, then the sizes of the batch dimensions."""
    a, b = list(left.value.shape), list(right.value.shape)
    if not a or not b:
        return Clash(left, right, "an operand has no dimensions")
    if transposed:
        b = [*b[:-2], *reversed(b[-2:])]
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        fits = len(b) > 1 and a[-1] == b[-1]
        return Clash(left, right, f"the inner sizes {a[-1]} and {inner} differ", a[-1], inner, fits)
    clash = broadcast_clash([a[:-2], b[:-2]])
    if clash is not None:
        return Clash(left, right, f"the batch sizes {clash[1]} and {clash[2]} differ", clash[1], clash[2])
    return None


def _einsum(call: Call) -> Clash | None:
    equation = call.get(0, "equation")
    operands = [argument for argument in call.flat() if argument.value is not equation]
    if not isinstance(equation, str) or any(operand.tensor is None for operand in operands):
        return None
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) != len(operands):
        return None
    seen: dict[str, tuple[int, Argument]] = {}
    for position, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        sizes = list(operand.value.shape)
        head, dots, tail = term.partition("...")
        if len(head + tail) > len(sizes) or (not dots and len(head) != len(sizes)):
            why = f"`{term}` names {len(head + tail)} dimensions, and operand {position} has {len(sizes)}"
            return Clash(operands[0], operand, why)
        pairs = [*zip(head, sizes, strict=False), *zip(reversed(tail), reversed(sizes), strict=False)]
        for letter, size in pairs:
            known, other = seen.setdefault(letter, (size, operand))
            if size != known and 1 not in (size, known):
                return Clash(other, operand, f"`{letter}` stands for {known} and for {size}", known, size)
            if known == 1:
                seen[letter] = (size, operand)
    return None


def _bilinear(call: Call) -> Clash | None:
    first, second, weight = (_operand(call, at, (name,)) for at, name in enumerate(("input1", "input2", "weight")))
    if first is None or second is None or weight is None or weight.value.dim() != 3:
        return None
    for side, wanted in ((first, weight.value.shape[1]), (second, weight.value.shape[2])):
        given = int(side.value.shape[-1]) if side.value.dim() else 0
        if given != wanted:
            return Clash(side, weight, f"the sizes {given} and {wanted} differ", given, wanted)
    return None


def _tensordot(call: Call) -> Clash | None:
    left, right = _operand(call, 0, ("a", "self")), _operand(call, 1, ("b", "other"))
    axes = call.get(2, "dims_a"), call.get(3, "dims_b")
    if left is None or right is None or not all(isinstance(side, list | tuple) for side in axes):
        return None
    for one, other in zip(*axes, strict=False):
        given, wanted = left.value.shape[one], right.value.shape[other]
        if given != wanted:
            return Clash(left, right, f"the contracted sizes {given} and {wanted} differ", given, wanted)
    return None


def _chain(call: Call) -> Clash | None:
    members = list(call.flat())
    for left, right in itertools.pairwise(members):
        if left.tensor is not None and right.tensor is not None:
            clash = pair_clash(left, right)
            if clash is not None:
                return clash
    return None


def _attention(call: Call) -> Clash | None:
    query, key, value = (_operand(call, at, (name,)) for at, name in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None or min(part.value.dim() for part in (query, key, value)) < 2:
        return None
    q, k, v = (part.value.shape for part in (query, key, value))
    if q[-1] != k[-1]:
        return Clash(query, key, f"query and key have {q[-1]} and {k[-1]} features", q[-1], k[-1])
    if k[-2] != v[-2]:
        return Clash(key, value, f"key and value have {k[-2]} and {v[-2]} positions", k[-2], v[-2])
    # With grouped queries the number of heads may differ.
    clash = broadcast_clash([q[:-2], k[:-2], v[:-2]]) if call.get(7, "enable_gqa") is not True else None
    if clash is not None:
        return Clash(query, key, f"the batch or head sizes {clash[1]} and {clash[2]} differ", clash[1], clash[2])
    return None


def in_our_words(evidence: RaisedEvidence, messages: Iterable[tuple[str, str]]) -> str | None:
    """The words of the first pattern that the message has, with what it names."""
    for pattern, words in messages:
        if (found := re.search(pattern, evidence.message, re.M)) is not None:
            return words.format(*found.groups())
    return None


def by_message(
    rule: Rule[RaisedEvidence],
    evidence: RaisedEvidence,
    messages: Iterable[tuple[str, str]],
    happened: str,
    advice: str,
) -> Draft | None:
    """The diagnosis from torch's message, where an operand could not be read. `happened` has a `{}` for the sizes."""
    why = in_our_words(evidence, messages) if evidence.is_torchs else None
    if why is None:
        return None
    draft = rule.draft(evidence, "likely", happened.format(why), f"torch says: {why}")
    return draft.at(*evidence.at_user_line("cause", why)).help(advice)
