"""The NVIDIA driver does not fit the CUDA version of torch, or its two parts have different versions.

What: torch includes the CUDA runtime, and the machine has the driver. A driver supports the CUDA version of its release
and older ones. The driver has two parts, a kernel module and a library, which must have the same version.

Why: a new torch on a machine with an old driver; a driver that was updated while the old kernel module stays loaded
until the next restart (error 803); a container with a `cuda-compat` library that does not support the GPU (error 804);
a kernel that was compiled with a newer CUDA than the driver supports.

Cure: update the driver, or install a build of torch for an older CUDA version. Restart the machine after an update of
the driver.
"""

from __future__ import annotations

import re

from torchmedic.detect.failures.device_errors import DeviceFault, device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.evidence.devices.cuda_setup import CudaSetup, read_setup
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Grade


@rule("TM314", "driver-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    fault = device_fault_of(evidence.error)
    if fault is None or fault.kind != "insufficient_driver" or not (evidence.is_torchs or evidence.from_loader):
        return None
    setup = read_setup()
    if fault.code == 35 and setup.lacks_driver:
        return None
    grade, message, advice = _told(fault, setup, evidence.message)
    draft = check.draft(evidence, grade, message, fault.words)
    draft.at(
        *raised_at(evidence, "CUDA could not be started" if fault.code != 222 else "this kernel could not be loaded")
    )
    draft.because(*setup.words)
    if setup.library is not None:
        draft.because(f"the driver's library that this process has loaded is {setup.library}")
    return draft.help(advice)


def _told(fault: DeviceFault, setup: CudaSetup, message: str) -> tuple[Grade, str, str]:
    driver = f"the NVIDIA driver ({setup.driver})" if setup.driver else "the NVIDIA driver"
    if fault.code == 803:
        differ = setup.library is not None and setup.driver is not None and setup.library != setup.driver
        return (
            "proven" if differ else "likely",
            f"the driver's library ({setup.library}) and its kernel module ({setup.driver}) are of two versions"
            if differ
            else "the library and the kernel module of the NVIDIA driver do not fit each other",
            "restart the machine (or reload the kernel modules), so that the updated driver is used as a whole",
        )
    if fault.code == 804:
        return (
            "proven",
            "the CUDA compatibility library is in use, and this GPU does not support it",
            "take `cuda-compat` out of LD_LIBRARY_PATH, or use a build of torch for the CUDA that the driver supports",
        )
    if fault.code == 222:
        return (
            "likely",
            f"a kernel was compiled by a newer CUDA than {driver} knows",
            "update the driver, or compile the kernel with an older CUDA",
        )
    supported = re.search(r"found version (\d+)", message)
    known = f", which supports CUDA {int(supported[1]) // 1000}.{int(supported[1]) % 1000 // 10}" if supported else ""
    built = f" CUDA {setup.build}, for which torch was built" if setup.build else " the CUDA that torch was built for"
    return (
        "proven",
        f"{driver}{known}, is too old for{built}" if known else f"{driver} is too old for{built}",
        "update the driver, or install a build of torch for an older CUDA",
    )
