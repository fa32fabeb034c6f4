"""Two matrices whose inner sizes differ were multiplied.

What: a matrix product needs the last size of the left operand to equal the second-last size of the right one. A
linear layer is such a product: its `in_features` must equal the last size of what it is given.

Why: most often a tensor was flattened, pooled or transposed to another size than the layer was built for, or the
size of the layer was computed by hand for another input.

Cure: make the layer as wide as its input, or bring the input to the width that the layer was built for.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.origins import built_at, origin_of, user_argument

CODE, NAME = "TM151", "matmul-shape-mismatch"

_PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm mv dot addmv addbmm __matmul__ matmul_".split())


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    call = evidence.call
    if call is None or call.op not in _PRODUCTS:
        return None
    operands = call.tensors
    if call.op in ("addmm", "baddbmm", "addmv", "addbmm") and len(operands) >= 3:
        operands = operands[1:]
    if len(operands) < 2:
        return _from_message(evidence)
    left, right = operands[0].value, operands[1].value
    # `F.linear` takes its weight as (out, in).
    inner = right.shape[-1] if call.op == "linear" else right.shape[-2] if right.dim() > 1 else right.shape[0]
    if left.dim() == 0 or left.shape[-1] == inner:
        return None
    layer = call.frame.module if not call.frame.is_user else None
    name = f"`{type(layer).__name__}`" if layer is not None else f"`{call.op}`"
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"{name} was given {left.shape[-1]} features where it takes {inner}",
        f"the left operand is {list(left.shape)}, so its last size is {left.shape[-1]}; "
        f"the right one, {list(right.shape)}, needs {inner}",
    )
    draft.at(*evidence.at_user_line("cause", f"{left.shape[-1]} features meet {inner}"))
    passed = user_argument(evidence.frames, left)
    if passed is not None:
        origin = origin_of(evidence.frames, passed[0], passed[1].node)
        if origin is not None:
            draft.at(origin.location("origin", f"`{origin.name}` becomes {list(left.shape)} here"))
    if layer is not None:
        draft.at(built_at(evidence.frames, layer, f"the layer is built for {inner} features here"))
        draft.help(f"build the layer for {left.shape[-1]} features, or bring its input to {inner}")
    else:
        draft.help("transpose or reshape one operand so that the inner sizes agree")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _from_message(evidence: RaisedEvidence) -> Diagnosis | None:
    sizes = re.search(r"\((\d+)x(\d+) and (\d+)x(\d+)\)", evidence.message)
    if sizes is None:
        return None
    rows, given, inner, columns = sizes.groups()
    draft = Draft(
        CODE,
        NAME,
        "likely",
        f"a matrix product was given {given} features where it takes {inner}",
        f"torch names the operands as {rows} x {given} and {inner} x {columns}",
    )
    draft.at(*evidence.at_user_line("cause", f"{given} features meet {inner}"))
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
