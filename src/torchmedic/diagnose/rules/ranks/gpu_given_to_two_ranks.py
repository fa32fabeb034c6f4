"""NCCL refuses a job in which two ranks use the same GPU.

What: every rank of a group must bring a GPU of its own. NCCL compares them at the first collective and raises
"Duplicate GPU detected".

Why: `model.cuda()` or `device="cuda"` without `torch.cuda.set_device(local_rank)`, so that all ranks take device 0; or
more ranks were started on the host than it has GPUs.

Cure: call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, and start one rank per GPU. Ranks that must
share a GPU can use the gloo backend.
"""

from __future__ import annotations

import os
import re

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence

_DUPLICATE = re.compile(r"Duplicate GPU detected\s*:\s*rank (\d+) and rank (\d+) both on CUDA device (\w+)")


@rule("TM720", "gpu-given-to-two-ranks")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _DUPLICATE.search(evidence.message)
    if found is None:
        return None
    one, other = sorted((int(found[1]), int(found[2])))
    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    too_few = 0 < gpus < local
    draft = check.draft(evidence, "proven")
    draft.message = f"ranks {one} and {other} use the same GPU, which NCCL refuses"
    draft.cause = (
        f"{local} ranks were started on this host, and it has {gpus} GPU{'s' if gpus > 1 else ''}"
        if too_few
        else f"both ranks use the GPU with bus number {found[3]}, and this process can see {gpus}"
    )
    draft.at(*evidence.at_user_line("cause", "the GPUs of all ranks are compared here"))
    draft.because(f"this rank uses device {torch.cuda.current_device()}" if torch.cuda.is_initialized() else "")
    if too_few:
        draft.help(f"start {gpus} rank{'s' if gpus > 1 else ''} on this host, or use the gloo backend")
    else:
        draft.help('call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before the first collective')
    return draft
