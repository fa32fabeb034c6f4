"""CUDA was used in a process that was forked after its parent had used CUDA.

What: a forked process has a copy of its parent's memory, but the CUDA driver does not support that copy: the GPU
handles of the parent do not work there. torch therefore refuses to use CUDA in a child that was forked after CUDA was
initialised.

Why: a dataset, a transform or a collate function moves tensors to the GPU (`.cuda()`, `.to(device)`, `device="cuda"`)
while the DataLoader has `num_workers`, whose processes are forked; or a `multiprocessing.Process` of the script does
so. On Linux `multiprocessing` forks by default (before Python 3.14).

Cure: return CPU tensors from the dataset and move the whole batch to the GPU in the training loop, with
`pin_memory=True` for speed; or start the processes with `spawn`.
"""

from __future__ import annotations

import multiprocessing

from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import cuda_started_at, raised_at, raised_remotely, started_at, worker_of
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM311", "cuda-in-forked-process")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds:
        return None
    refused = evidence.says("re-initialize CUDA in forked")
    fault = device_fault_of(evidence.error)
    # What the driver itself says, where torch does not know that the parent has used it.
    if not refused and (fault is None or fault.code != 3 or not _is_child(evidence)):
        return None
    remote = raised_remotely(evidence, "") is not None
    if not (evidence.is_torchs or evidence.from_loader or remote):
        return None
    loading = worker_of(evidence)
    where = "a DataLoader worker" if loading is not None else "a forked process"
    draft = check.draft(evidence, "proven" if refused else "likely")
    draft.message = f"CUDA was used in {where}, whose parent had used CUDA before"
    draft.cause = "a forked process cannot use the CUDA context of its parent"
    draft.at(*raised_at(evidence, f"uses CUDA in {where}"))
    if loading is not None:
        draft.at(loading.at_loader("origin", "its workers are forked from this process"))
        draft.because(loading.process)
        draft.help("return CPU tensors from the dataset, and send the batch to the GPU in the training loop")
        draft.help('start the workers as new processes: `DataLoader(..., multiprocessing_context="spawn")`')
    else:
        draft.at(None if remote else started_at(evidence, "this process was forked here"))
        draft.help('start the process anew: `multiprocessing.get_context("spawn").Process(...)`')
        draft.help("use CUDA for the first time in the child, not before it is forked")
    return draft.at(cuda_started_at("CUDA was used for the first time here, before that"))


def _is_child(evidence: RaisedEvidence) -> bool:
    """Whether the process may be a child of `multiprocessing`: a DataLoader worker or another one."""
    return worker_of(evidence) is not None or multiprocessing.parent_process() is not None
