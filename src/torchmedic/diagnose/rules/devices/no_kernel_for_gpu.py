"""The code was not compiled for this GPU.

What: a GPU runs code that was compiled for its compute capability, or an intermediate form (PTX) for an older
capability, which the driver compiles. A build of torch, or of an extension, contains code for a list of capabilities.

Why: the GPU is older than the oldest, or newer than the newest capability of the build; or an extension was compiled on
another machine with TORCH_CUDA_ARCH_LIST set for the GPU of that machine.

Cure: install a build of torch that supports this GPU, or compile the extension for its compute capability.
"""

from __future__ import annotations

import torch

from torchmedic.detect.failures.architectures import covers
from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.evidence.devices.cuda_setup import read_setup
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM315", "no-kernel-for-gpu")
def check(evidence: RaisedEvidence) -> Draft | None:
    fault = device_fault_of(evidence.error)
    if fault is None or fault.kind != "no_kernel_image" or not (evidence.is_torchs or evidence.from_loader):
        return None
    try:
        capability = torch.cuda.get_device_capability()
        archs, gpu = list(torch.cuda.get_arch_list()), torch.cuda.get_device_name()
    except (RuntimeError, AssertionError):
        return None  # nothing can be asked of the device
    name = f"sm_{capability[0]}{capability[1]}"
    op = evidence.call.op if evidence.call is not None and evidence.call.op else "the operation"
    missing = bool(archs) and not covers(archs, capability)
    draft = check.draft(evidence, "proven" if missing else "likely")
    draft.message = (
        f"this torch holds no code for the {gpu} ({name})"
        if missing
        else f"`{op}` holds no code for the {gpu} ({name}), though torch itself does"
    )
    draft.cause = f"the GPU is {name}; torch was compiled for {', '.join(archs)}"
    draft.at(*raised_at(evidence, f"no code for {name}"))
    draft.because(*read_setup().words)
    if missing:
        draft.help(f"install a build of torch that was compiled for {name}")
    else:
        draft.help(
            f'compile the extension that `{op}` comes from for this GPU: TORCH_CUDA_ARCH_LIST="{_list(capability)}"'
        )
    return draft


def _list(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
