"""The driver refused to pin host memory.

What: `pin_memory()`, `pin_memory=True` or a DataLoader that pins its batches requested page-locked host memory from the
driver, so that the GPU can copy from it directly. The driver refused: here `CUDA error: out of memory` refers to the
host, not to the GPU.

Why: pinned memory cannot be moved, and the kernel and the driver allow less of it than there is memory. PyTorch rounds
the size up to the next power of two, keeps pinned memory for later, and every rank on the host does the same. Limits of
the process (`ulimit -v`, `ulimit -l`) and of its container apply as well.

Cure: pin less: only the data that is copied next, smaller batches or a smaller `prefetch_factor`; or use
`pin_memory=False`, which only makes copies slightly slower.
"""

from __future__ import annotations

import resource

from torchmedic.detect.failures.device_errors import fault_in
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.data_loading import Loading, loading_of
from torchmedic.evidence.devices.cuda_setup import LITTLE, free_on_device
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.result_sizes import results_of
from torchmedic.observe.memory.host import HostMemory, host_memory
from torchmedic.observe.memory.limits import refusing
from torchmedic.observe.memory.usage import pinned_bytes
from torchmedic.records import Role
from torchmedic.source.lookup.loader_lines import loader_call

_OS_FAILED = 304  # cudaErrorOperatingSystem: the kernel refused what the driver asked of it


@rule("TM416", "pinned-memory-refused")
def check(evidence: RaisedEvidence) -> Draft | None:
    worker = evidence.incident.worker
    fault = fault_in(worker.message if worker is not None else evidence.message)
    refused = fault is not None and (fault.kind == "out_of_memory" or _is_os(fault.code, fault.words))
    if not refused or fault is None or not _pins(evidence):
        return None
    room = free_on_device()
    if room is not None and room[0] < LITTLE and fault.kind == "out_of_memory":
        return None  # then it may as well be the device that has none left
    asked, memory = _asked(evidence), host_memory()
    what = f"{size(asked)} of the host's memory" if asked else "memory of the host"
    draft = check.draft(evidence, "proven", f"{what} could not be pinned (page-locked) for the GPU", fault.words[:200])
    _place(draft, evidence, loading_of(evidence))
    _numbers(draft, asked, memory)
    if room is not None:
        draft.because(f"it is not the GPU: {size(room[0])} of its {size(room[1])} are free")
    return draft.help("pin less: `pin_memory=False`, a smaller batch or `prefetch_factor`, or only what is copied next")


def _is_os(code: int | None, words: str) -> bool:
    return code == _OS_FAILED or "OS call failed" in words or "cudaHostAlloc" in words or "cudaHostRegister" in words


def _pins(evidence: RaisedEvidence) -> bool:
    """Whether the call that failed pins memory, and does not start CUDA on the way."""
    worker = evidence.incident.worker
    if worker is not None:
        return any(frame.function in ("pin_memory", "_pin_memory_loop") for frame in worker.frames)
    names = {frame.function for frame in evidence.frames if not frame.is_user}
    if "_lazy_init" in names:
        return False
    return "pin_memory" in names or any(
        call.op == "pin_memory" or any(each.name == "pin_memory" and each.value is True for each in call.arguments)
        for call in evidence.calls
    )


def _asked(evidence: RaisedEvidence) -> int:
    if evidence.incident.worker is not None:
        return 0
    for call in evidence.calls:
        if call.op == "pin_memory" and call.tensors:
            return int(call.tensors[0].value.nbytes)
    return next((each.nbytes for each in results_of(evidence.calls)), 0)


def _place(draft: Draft, evidence: RaisedEvidence, loading: Loading | None) -> None:
    if loading is None and evidence.incident.worker is None:
        inside = [frame for frame in evidence.frames if not frame.is_user and frame.function == "__next__"]
        if not inside:
            draft.at(*evidence.at_user_line("cause", "pinned here"))
            return
    label = "this loader pins its batches"
    file = loading.file if loading is not None else ""
    made = loading.at_loader("cause", label) if loading is not None else None
    draft.at(made or loader_call("cause", label, file, "pin_memory"))
    role: Role = "surfaced" if draft.has_place else "cause"
    draft.at(*evidence.at_user_line(role, "the batch was asked for here"))


def _numbers(draft: Draft, asked: int, memory: HostMemory) -> None:
    pinned = pinned_bytes()
    if pinned:
        draft.because(f"{size(pinned)} are pinned already, with what PyTorch keeps for later")
    rounded = 1 << max(0, asked - 1).bit_length() if asked else 0
    if rounded > asked * 1.25:
        draft.because(f"PyTorch pins the next power of two: {size(rounded)} for {size(asked)}")
    if memory.total is not None and memory.available is not None:
        draft.because(f"the host has {size(memory.total)}, of which {size(memory.available)} are free")
    if memory.cgroup_limit is not None:
        draft.because(f"its cgroup may hold {size(memory.cgroup_limit)}")
    bound = refusing(memory, rounded or None)
    if bound is not None and bound.certain:
        draft.because(f"the process may have {size(bound.limit)} of {bound.of} ({bound.name}, `{bound.option}`)")
        draft.help(f"raise that limit: `{bound.option} unlimited`")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and locked < asked:
        draft.because(f"the process may lock {size(locked)} (`ulimit -l`), which some drivers go by")
