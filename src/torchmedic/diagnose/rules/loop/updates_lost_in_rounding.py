"""The updates are too small to change the weights in their dtype.

What: nearly all sampled weights have a gradient and are bit for bit what they were many updates ago.

Why: a number of the dtype has neighbours, and the distance to the next one grows with the number: for `bfloat16` it is
1/128 of the number at most, for `float16` 1/1024, for `float32` 1/8388608. An update that is smaller than half of that
distance is rounded away. So weights in `bfloat16` with a learning rate that suits `float32` do not move: most updates
are lost, and the run learns nothing. A rate with a zero too many, or a clip with a small bound, does the same in any
dtype. No error is raised.

Cure: keep the weights in `float32` and compute in `bfloat16` with `torch.autocast`; or use a larger learning rate.
"""

from __future__ import annotations

import ast
import sys

import msgspec
import torch

from torchmedic.detect.loop.incident import UpdatesLost
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location, stack_of
from torchmedic.source.lookup.named_numbers import ANY, set_and_used
from torchmedic.source.syntax import callee, calls_in, last_name
from torchmedic.source.user_variables import user_trees

_SHORT = {"bfloat16": ("bfloat16",), "float16": ("float16", "half")}  # dtypes, and the names of what converts to them


@loop_rule("TM626", "updates-lost-in-rounding", UpdatesLost)
def check(evidence: LoopEvidence, incident: UpdatesLost) -> Draft | None:
    updates = count(incident.updates, "update")
    draft = check.draft(evidence, "proven")
    if incident.clipped_to == 0:
        return _clipped_to_nothing(evidence, incident, draft)
    draft.message = f"the weights do not change: the updates are too small for their dtype, {incident.dtype}"
    made = f"with a learning rate of {incident.rate:g}"
    label = f"holds weights in {incident.dtype}, with a rate of {incident.rate:g}"
    if incident.clipped_to is not None:
        made = f"with gradients that are clipped to a norm of {incident.clipped_to:g}"
        label = f"leaves gradients with a norm of {incident.clipped_to:g}"
    draft.cause = f"{made}, the updates are smaller than the distance between two numbers"
    if incident.change:
        draft.message = (
            f"the weights hardly change: an update moves none of them by more than {incident.change:.1e} of their size"
        )
        draft.cause = f"{made}, the updates are next to nothing"
        label = label if incident.clipped_to is not None else f"the learning rate is {incident.rate:g}"
    cause, bound = evidence.at("cause", incident.cause, label), incident.clipped_to
    low = _converted_at(evidence, incident.dtype) if bound is None and not incident.change else None
    if low is not None and cause is not None:
        draft.at(low, msgspec.structs.replace(cause, role="origin"))
    else:
        draft.at(*(set_and_used(bound, cause, "the bound of the norm", ANY) if bound is not None else (cause,)))
    draft.at(
        evidence.at(
            "surfaced", incident.update, "changes next to nothing" if incident.change else "is rounded away", "step"
        )
    )
    still = incident.graded - incident.moved
    draft.because(
        f"at that pace, {1 / incident.change:.1e} updates would change the weights as a whole"
        if incident.change
        else f"{still} of {count(incident.graded, 'sampled weight')} with a gradient are bit for bit what they were "
        f"{updates} ago",
    )
    if incident.clipped_to is not None:
        cure = "clip to a larger norm"
    elif incident.dtype in ("bfloat16", "float16"):
        cure = f"keep the weights in float32, and compute in {incident.dtype} with `torch.autocast`"
    else:
        cure = "use a larger learning rate"
    draft.help(cure, safety="changes-training")
    return draft.rated("warning")


def _converted_at(evidence: LoopEvidence, dtype: str) -> Location | None:
    """The one call in the user's code that gives a model weights of a short dtype; None where there are several."""
    if dtype not in _SHORT:
        return None
    names = set(_SHORT[dtype])
    found = [
        (file, call)
        for file, tree in user_trees()
        for call in calls_in(tree)
        if isinstance(call.func, ast.Attribute)
        and (
            call.func.attr in names
            or (call.func.attr == "to" and any(last_name(each) in names for each in _given(call)))
        )
        and _is_model(evidence, call.func.value)
    ]
    return node_location("cause", *found[0], f"the weights are {dtype} from here on") if len(found) == 1 else None


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_model(evidence: LoopEvidence, receiver: ast.expr) -> bool:
    """Whether an expression is a module: a new one, or a variable or an attribute that holds one."""
    name = callee(receiver) if isinstance(receiver, ast.Call) else last_name(receiver)
    if isinstance(receiver, ast.Call):
        return name in {type(module).__name__ for model in evidence.habits.models for module in model.modules()}
    frames = stack_of(sys._getframe())
    owners = [vars(frame.variables["self"]) for frame in frames if hasattr(frame.variables.get("self"), "__dict__")]
    held = [space.get(name) for space in (*(frame.variables for frame in frames), *owners)]
    return any(isinstance(value, torch.nn.Module) for value in held)


def _clipped_to_nothing(evidence: LoopEvidence, incident: UpdatesLost, draft: Draft) -> Draft:
    draft.message = "nothing is learned: all gradients are clipped to 0"
    draft.cause = "clipping to a norm of 0 multiplies every gradient by 0"
    draft.at(
        evidence.at("cause", incident.cause, "clips to a norm of 0"),
        evidence.at("surfaced", incident.update, "has only gradients of 0", "step"),
    )
    draft.because(f"the last {count(incident.updates, 'update')} came after such a call, and all gradients are 0")
    draft.help("clip to a norm above 0, or leave the call out if 0 means that nothing is clipped")
    return draft.rated("warning")
