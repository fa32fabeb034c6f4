"""A collective or message names a rank that its group does not have.

What: `src` and `dst` are ranks of the whole job, also where a group is passed. The group of this call has no such rank,
or the rank would send a message to itself. Or a new group or device mesh is made for more ranks than the job has.

Why: the place of a rank in its group was passed in place of its rank in the job: `src=0` for the first member of the
group of ranks 2 and 3. Or a neighbour was computed from the size of another group. Or the sizes of groups are those of
a job of another size.

Cure: pass the rank in the job, for example `dist.get_global_rank(group, 0)`, or `group_src=0` and `group_dst=0`.
Compute the sizes of groups and meshes from `dist.get_world_size()`.
"""

from __future__ import annotations

import math

import torch.distributed

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame

_CALLS = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv")
_NAMES = ("global_rank", "group_rank", "rank", "group_src", "group_dst")


@rule("TM724", "rank-outside-of-group")
def check(evidence: RaisedEvidence) -> Draft | None:
    making = evidence.inside("_new_group_with_tag", "init_device_mesh")
    if making is not None:
        return _too_large(evidence, making)
    frame = evidence.inside("get_group_rank", "get_global_rank", "_check_not_self_rank", *_CALLS)
    group = frame.variables.get("group") if frame is not None else None
    if frame is None or not isinstance(group, torch.distributed.ProcessGroup):
        return None
    members = torch.distributed.get_process_group_ranks(group)
    named = next((value for name in _NAMES if type(value := frame.variables.get(name)) is int), None)
    if named is None or (frame.function in _CALLS and 0 <= named < len(members)):
        return None
    draft = check.draft(evidence, "proven")
    if frame.function == "_check_not_self_rank":
        draft.message = f"rank {evidence.rank} is to exchange a message with itself"
        draft.cause = "the source or destination of this call is the rank that makes it"
        help_ = "leave out this message, or compute the other rank from the size of the group"
    elif frame.function == "get_group_rank" or group is torch.distributed.group.WORLD:
        draft.message = f"this call names rank {named}, and its group has {ranks(members)} only"
        draft.cause = "`src` and `dst` are ranks of the whole job, also in a group"
        is_place = 0 <= named < len(members)
        if group is torch.distributed.group.WORLD:
            draft.cause = f"the job has {len(members)} ranks, which count from 0"
        draft.because(f"rank {members[named]} has the place {named} in this group" if is_place else "")
        help_ = (
            f"pass rank {members[named]}, or pass {named} as `group_src` or `group_dst`"
            if is_place
            else f"pass one of the ranks of the group: {ranks(members)}"
        )
    else:
        draft.message = f"this call names place {named} of its group, which has {len(members)} ranks"
        draft.cause = "`group_src` and `group_dst` count the members of the group from 0"
        help_ = f"pass a number below {len(members)}"
    return draft.at(*evidence.at_user_line("cause", "no such rank in the group of this call")).help(help_)


def _too_large(evidence: RaisedEvidence, making: Frame) -> Draft | None:
    """A group or mesh that is made for more ranks than there are."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    shape, named = making.variables.get("mesh_shape"), making.variables.get("ranks")
    draft = check.draft(evidence, "proven")
    if isinstance(shape, tuple) and math.prod(shape) > world > 0:
        sizes = " x ".join(map(str, shape))
        draft.message = f"a device mesh of {sizes} needs {math.prod(shape)} ranks, and the job has {world}"
        draft.cause = f"the product of the sizes is {math.prod(shape)}, and every place of a mesh is a rank of its own"
        draft.at(*evidence.at_user_line("cause", f"needs {math.prod(shape)} ranks"))
        return draft.help(f"choose sizes whose product is {world}, or start {math.prod(shape)} ranks")
    strange = [each for each in named if not 0 <= each < world] if isinstance(named, list | tuple | range) else []
    if not strange or not world:
        return None
    draft.message = f"a group is made with {ranks(strange)}, which the job does not have"
    draft.cause = f"the job has {world} ranks, which count from 0"
    draft.at(*evidence.at_user_line("cause", "no such rank in this job"))
    return draft.help("compute the members from `dist.get_world_size()`, or start as many ranks as the groups need")
