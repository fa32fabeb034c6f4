"""A collective gets an argument that does not fit on this rank.

What: `gather` and `scatter` take the list of all parts on one rank only: the rank that receives, or the rank that
sends. Here another rank passes the list, or this rank passes none. Or a number, a list or None is passed where a tensor
is needed. Or the list of `all_gather`, `gather` or `scatter` has more or fewer parts than the group has ranks. Or the
tensor that is shared out, or put together, is not as large as the parts of all ranks.

Why: all ranks run the same line, and the list is built on all of them. Or a loss went through `.item()` before it was
to be summed over the ranks.

Or the size of a part was rounded, and the flat tensor was not padded to a multiple of the number of ranks.

Cure: pass the list on the rank of `dst` or `src`, and None on the others. Make a tensor of a number: `torch.tensor(x)`.
"""

from __future__ import annotations

import torch.distributed
from torch import Tensor

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame

_C10D = "torch/distributed/distributed_c10d.py"
_CHECKS = ("_check_single_tensor", "_check_tensor_list")
_LISTS = ("_validate_output_list_for_rank", "scatter")
_PARTS = {"all_gather": "tensor_list", "gather": "gather_list", "scatter": "scatter_list"}
# The variables of the functions that share out one tensor, or put one together: the whole one, and a part.
_WHOLES = dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), ("input", "output")) | dict.fromkeys(
    ("all_gather_into_tensor", "all_gather_single"), ("output_tensor", "input_tensor")
)


@rule("TM727", "collective-arguments-do-not-fit")
def check(evidence: RaisedEvidence) -> Draft | None:
    last = evidence.frames[-1] if evidence.frames else None
    if last is None or not last.file.endswith(_C10D) or evidence.user_frame is None:
        return None
    if last.function in _CHECKS:
        return _no_tensor(evidence, last)
    wrong = _length(evidence, last) if last.function in _PARTS else None
    if wrong is not None:
        return wrong
    if last.function in _WHOLES:
        return _sizes(evidence, last)
    return _list(evidence, last) if last.function in _LISTS and "ValueError" in evidence.kinds else None


def _no_tensor(evidence: RaisedEvidence, frame: Frame) -> Draft | None:
    given, name = frame.variables.get("param"), frame.variables.get("param_name")
    parts = given if frame.function == "_check_tensor_list" and isinstance(given, list) else [given]
    wrong = next((each for each in parts if not isinstance(each, Tensor)), None)
    kind = type(wrong).__name__
    if wrong is None and parts is not given:
        return _nothing(evidence, name)
    what = f"of `{kind}`" if parts is given else f"a `{kind}`"
    wanted = "a list of tensors" if frame.function == "_check_tensor_list" else "a tensor"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{_name(evidence)}` needs {wanted}, and `{name}` is {'a list ' if parts is given else ''}{what}"
    draft.cause = "collectives exchange tensors, and write their result into them"
    draft.at(
        *evidence.at_user_line(
            "cause", f"`{name}` is not a tensor" if wanted == "a tensor" else "not a list of tensors"
        )
    )
    if isinstance(wrong, int | float):
        return draft.help("pass a tensor, and read the result out of it: `t = torch.tensor(x)`, then `t.item()`")
    return draft.help("pass tensors; for other objects there are `all_gather_object` and `broadcast_object_list`")


def _nothing(evidence: RaisedEvidence, name: object) -> Draft:
    """None in place of a tensor: a parameter that the loss of this rank did not reach has no gradient."""
    call = evidence.find(_name(evidence))
    text = call.arguments[0].text if call is not None and call.arguments else ""
    draft = check.draft(evidence, "proven")
    draft.message = f"`{_name(evidence)}` needs a tensor, and `{text or name}` is None on this rank"
    draft.cause = "collectives exchange tensors, and write their result into them"
    draft.at(*evidence.at_user_line("cause", f"`{text or name}` is None"))
    if text.endswith(".grad"):
        draft.because("the loss of this rank did not reach this parameter, so backward gave it no gradient")
        return draft.help("give it a gradient of zeros, or compute the loss from the same parameters on all ranks")
    return draft.help("pass a tensor of the same shape on all ranks")


def _length(evidence: RaisedEvidence, frame: Frame) -> Draft | None:
    parts, group = frame.variables.get(_PARTS[frame.function]), frame.variables.get("group")
    world = torch.distributed.get_world_size(group if isinstance(group, torch.distributed.ProcessGroup) else None)
    if not isinstance(parts, list) or not parts or len(parts) == world:
        return None
    call = _name(evidence)
    what = "objects" if "object" in call else "tensors"
    does = "takes" if frame.function == "scatter" else "sends"
    where = "" if frame.function == "all_gather" else f" on rank {evidence.rank}"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{call}` gets a list of {len(parts)} {what}{where}, and each of {world} ranks {does} one"
    draft.cause = f"the list needs one part for each rank of the group: {world}"
    draft.at(*evidence.at_user_line("cause", f"{len(parts)} {what} for {world} ranks"))
    if frame.function == "scatter":
        draft.help("cut into `dist.get_world_size(group)` parts, the last of which may be smaller: round the size up")
        return draft
    return draft.help(f"build the list with `dist.get_world_size(group)` {what}")


def _sizes(evidence: RaisedEvidence, frame: Frame) -> Draft | None:
    whole, part = (frame.variables.get(name) for name in _WHOLES[frame.function])
    group = frame.variables.get("group")
    world = torch.distributed.get_world_size(group if isinstance(group, torch.distributed.ProcessGroup) else None)
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.numel() == world * part.numel():
        return None
    name, number = _name(evidence), f"{world} parts of {part.numel()}"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` gets {whole.numel()} elements for {number} elements"
    draft.cause = f"the whole tensor has to be as large as the parts of all ranks: {world * part.numel()} elements"
    draft.at(*evidence.at_user_line("cause", f"{whole.numel()} elements for {number}"))
    draft.because(f"{whole.numel()} is no multiple of {world}" if whole.numel() % world else "")
    return draft.help(
        "pad the whole tensor to a multiple of the number of ranks, and compute the size of a part from it"
    )


def _list(evidence: RaisedEvidence, frame: Frame) -> Draft | None:
    known = frame.variables
    gathers = frame.function != "scatter"
    own, one = known.get("my_rank" if gathers else "my_group_rank"), known.get("dst" if gathers else "group_src")
    name = "gather_list" if gathers else "scatter_list"
    call = _name(evidence)
    name = f"object_{name}" if call == "gather_object" else name
    if type(own) is not int or type(one) is not int:
        return None
    does, side = ("receives", "dst") if gathers else ("sends", "src")
    draft = check.draft(evidence, "proven")
    if own == one:
        draft.message = f"rank {evidence.rank} passes no `{name}` to `{call}`, and it is the rank that {does}"
        draft.cause = f"the rank of `{side}` needs one place in `{name}` for each rank"
    else:
        draft.message = f"rank {evidence.rank} passes `{name}` to `{call}`, and only the rank of `{side}` {does}"
        draft.cause = f"`{name}` is for rank {one} of the group alone, and this rank is {own}"
    draft.at(*evidence.at_user_line("cause", f"`{name}` is for the rank of `{side}` alone"))
    return draft.help(f"pass `{name}` on the rank of `{side}`, and None on all others")


def _name(evidence: RaisedEvidence) -> str:
    """The function of torch that the user called."""
    inner = [each.function for each in evidence.frames if each.file.endswith(_C10D)]
    return inner[0] if inner else "this call"
