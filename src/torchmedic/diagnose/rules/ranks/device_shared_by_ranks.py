"""Two ranks of one host train on the same GPU, and another GPU is there.

What: the weights of two ranks are on the same device, although the processes can see more than one. The ranks take
turns on it and share its memory; NCCL refuses such a job ("Duplicate GPU detected"), gloo does not.

Why: `model.cuda()` or `device="cuda"` without `torch.cuda.set_device(local_rank)`, so that every rank takes device 0.

Cure: call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, or move the model to `f"cuda:{local_rank}"`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.rank_facts import JobFacts, RankFacts


@rule("TM717", "device-shared-by-ranks")
def check(job: JobFacts) -> Draft | None:
    users: dict[tuple[str, str], list[RankFacts]] = {}
    for each in job.ranks:
        if each.device:
            users.setdefault((each.host, each.device), []).append(each)
    shared = [found for found in users.values() if len(found) > 1 and len(found) <= found[0].devices]
    if not shared:
        return None
    found = shared[0]
    who = ranks([each.rank for each in found])
    draft = check.draft(job, "proven")
    draft.message = f"{who} train on the same GPU, while {found[0].devices} GPUs can be seen"
    draft.cause = f"the weights of {who} are on one device of host {found[0].host}"
    if found[0].updating is not None:
        draft.at(line_location("cause", found[0].updating.file, found[0].updating.line, "weights on one device"))
    draft.because(f"device {found[0].device}")
    draft.help('call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before the model is moved to the GPU')
    return draft.rated("warning")
