"""A collective or message names a rank that its group does not have.

What: `src` and `dst` are ranks of the whole job, also where a group is passed. The group of this call has no such rank,
or the rank would send a message to itself.

Why: the place of a rank in its group was passed in place of its rank in the job: `src=0` for the first member of the
group of ranks 2 and 3. Or a neighbour was computed from the size of another group.

Cure: pass the rank in the job, for example `dist.get_global_rank(group, 0)`, or `group_src=0` and `group_dst=0`.
"""

from __future__ import annotations

import torch.distributed

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.evidence.exception import RaisedEvidence

_CALLS = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv")
_NAMES = ("global_rank", "group_rank", "rank", "group_src", "group_dst")


@rule("TM724", "rank-outside-of-group")
def check(evidence: RaisedEvidence) -> Draft | None:
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
