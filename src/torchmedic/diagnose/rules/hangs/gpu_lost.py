"""The GPU has failed, and the run waits for it.

What: the driver has lost the GPU or has reported an error (an Xid) while the main thread waits: the GPU will not
continue.

Why: the GPU fell off the bus, overheated or has bad memory; its driver or firmware hangs; a kernel made it stop.

Cure: end the run. If the driver says so, reset the GPU (`nvidia-smi --gpu-reset`) or restart the machine; if the error
returns, continue from a checkpoint on another GPU.
"""

from __future__ import annotations

from torchmedic.detect.trends.gpu_health import health_facts
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import main_line, stall_rule, stands
from torchmedic.records.gpu import GpuState
from torchmedic.records.stall import Stall

# Xids after which nothing on the card goes on: memory, links, the bus, its firmware. NVML does not say which process
# they are about, so those that end one program (109: a slow switch of contexts) or only advise (154) are left out.
_FATAL = frozenset((48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143))
_MAX_AHEAD_SECONDS = 10.0  # that the host goes on after the device has failed, with work that it queues


@stall_rule("TM531", "gpu-lost")
def check(stall: Stall) -> Draft | None:
    known = [gpu for gpu in (stall.gpu.gpus if stall.gpu is not None else ()) if gpu.ordinal is not None]
    waits = stands(stall.inner) or stall.pid in stall.mute
    failed = [gpu for gpu in known if gpu.lost or _errors(gpu, stall)]
    if not waits or not failed:
        return None
    gpu = failed[0]
    codes = _errors(gpu, stall)
    said = gpu.lost or f"the driver reported Xid {', '.join(map(str, codes))}"
    draft = check.draft(stall, "proven", f"GPU {gpu.index} has failed, and the run waits for it", said)
    draft.at(main_line(stall, "cause", "the main thread waits here; no line of the script is the cause"))
    draft.because(*health_facts(stall.gpu))
    return draft.help("end the run, check `nvidia-smi -q` and the kernel log, and continue from a checkpoint")


def _errors(gpu: GpuState, stall: Stall) -> list[int]:
    """The fatal Xids since the process began to stand still, or shortly before.

    Others are about one program, which need not be ours, and which is told of them by an exception. None counts for a
    process that has not used the device yet: the start of CUDA takes seconds where many processes start.
    """
    if not _has_used_device(stall):
        return []
    at = stall.gpu.time if stall.gpu is not None else 0.0
    return sorted({xid.code for xid in gpu.xids if xid.time > at - stall.still - _MAX_AHEAD_SECONDS} & _FATAL)


def _has_used_device(stall: Stall) -> bool:
    has_trained = stall.box is not None and any(moment.updates for moment in stall.box.moments)
    return has_trained or (stall.inner is not None and bool(stall.inner.device_busy))
