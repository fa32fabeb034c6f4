"""An operation gets a part of a sharded weight beside a tensor that is not sharded.

What: under `fully_shard`, a rank keeps a part of each weight, a DTensor. The weights of a module are whole only while
its `forward` runs: hooks around it put them together. Here an operation got such a part, and a plain tensor.

Why: a weight is read from outside of the `forward` of its module, as for an output layer that uses the weight of an
embedding which is sharded by itself. Or another method than `forward` was called on a sharded module. Or, with
`parallelize_module`, a module that is not in the plan uses the weight of one that is.

Cure: call the module, and not its weight. Leave a module out of `fully_shard` if another one uses its weight: both then
belong to the unit around them. Let `register_fsdp_forward_method` put the hooks around another method as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmedic.detect.loop.shards import shards_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import Argument


@rule("TM731", "sharded-weight-used-directly")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("DTensor"):
        return None
    mixed = next((pair for call in evidence.calls if (pair := _mixed(call.tensors)) is not None), None)
    if mixed is None:
        return None
    part, plain = mixed
    unit, method = _unit(evidence, part.value)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{part.text}` is a part of a sharded weight, and the operation gets it beside a plain tensor"
    draft.because(f"`{part.text}` is a DTensor, {shape(part.value)} in all; `{plain.text}` is a plain tensor")
    if unit is None:
        draft.cause = "an operation takes either DTensors or plain tensors"
        draft.at(*evidence.at_user_line("cause", f"`{part.text}` is sharded, and `{plain.text}` is not"))
        return draft.help("let `parallelize_module` convert what goes in and out of the module, or use `full_tensor()`")
    draft.cause = f"the weights of this `{type(unit).__name__}` are whole only while its `forward` runs"
    if method is not None:
        draft.at(method[0].location("cause", f"`{method[1]}` is called, and not `forward`"))
        draft.at(*evidence.at_user_line("surfaced", f"`{part.text}` is still sharded"))
        return draft.help(f"call `register_fsdp_forward_method(module, '{method[1]}')` after `fully_shard`")
    draft.at(*evidence.at_user_line("cause", f"`{part.text}` is sharded here"))
    draft.help(
        f"do not give this `{type(unit).__name__}` to `fully_shard`: its weights then belong to the unit around it"
    )
    return draft.help("or compute this in the `forward` of the module that the weight belongs to")


def _mixed(tensors: list[Argument]) -> tuple[Argument, Argument] | None:
    """The first DTensor and the first plain tensor of a call, if it has both."""
    parts = [each for each in tensors if _is_dtensor(each.value)]
    others = [each for each in tensors if isinstance(each.value, Tensor) and not _is_dtensor(each.value)]
    return (parts[0], others[0]) if parts and others else None


def _is_dtensor(value: Any) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _unit(evidence: RaisedEvidence, part: Tensor) -> tuple[nn.Module | None, tuple[Frame, str] | None]:
    """The module under `fully_shard` that a weight belongs to; if a method of it is under way, its caller and name."""
    wanted = {id(part)}
    unit: nn.Module | None = None
    for frame in evidence.frames:
        for value in frame.variables.values():
            if isinstance(value, nn.Module) and unit is None:
                owners = [each for each in value.modules() if shards_of([each], wanted)]
                unit = owners[-1] if owners else None
    if unit is None:
        return None, None
    caller: Frame | None = None
    for frame in evidence.frames:
        if frame.variables.get("self") is unit and frame.is_user and caller is not None:
            return unit, (caller, frame.function) if frame.function != "forward" else None
        caller = frame if frame.is_user else caller
    return unit, None
