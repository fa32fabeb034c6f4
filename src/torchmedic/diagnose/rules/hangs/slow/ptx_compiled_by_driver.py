"""The driver compiles all kernels for this GPU; the run is not hung.

What: this build of torch contains no code for the GPU, only its portable form (PTX). The driver compiles the PTX at
first use, kernel by kernel: the first CUDA call does not return for minutes.

Why: a GPU that is newer than the build of torch, or another library that was built for older GPUs.

Cure: wait once; the driver stores the result in `~/.nv/ComputeCache`, if that folder is writable and large enough
(`CUDA_CACHE_PATH`, `CUDA_CACHE_MAXSIZE`). Better: install a build of torch that contains code for this GPU.
"""

from __future__ import annotations

from torchmedic.detect.failures.architectures import covers, covers_without_compiling
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import demand, native
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import BUSY, main_line, stall_rule, stands
from torchmedic.records.inside import InsideView
from torchmedic.records.stall import Stall

_COMPILER = "libnvidia-ptxjitcompiler"


@stall_rule("TM551", "ptx-compiled-by-driver")
def check(stall: Stall) -> Draft | None:
    view, inner = stall.view, stall.inner
    row = native(view, stall.thread)
    if view is None or inner is None or not stands(inner) or demand(row) < BUSY:
        return None
    gpu = _without_code(inner)
    frames = row.native if row is not None else ()
    loaded = _COMPILER in view.libraries
    inside = any("ptxjit" in name for name in frames)
    begun = stall.box is not None and stall.box.last is not None and stall.box.last.updates > 0
    if not (inside or (gpu and not begun) or (loaded and not begun and inner.device_busy is not True)):
        return None
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: the driver compiles kernels for {gpu or 'this GPU'}, for {duration(stall.still)} so far"
    draft.cause = (
        f"this torch has code for {', '.join(inner.architectures) or 'other GPUs'} only" if gpu else "PTX is compiled"
    )
    draft.at(main_line(stall, "cause", "the first use of the GPU waits here"))
    draft.because(f"the driver's compiler is loaded ({_COMPILER})" if loaded else "")
    draft.because("the main thread is inside of it" if inside else "")
    draft.because("the main thread is at one instruction of Python and at work in native code")
    draft.help("wait once: the result is kept in ~/.nv/ComputeCache (`CUDA_CACHE_PATH`, `CUDA_CACHE_MAXSIZE`)")
    draft.help("install a build of torch that has code for this GPU")
    return draft.rated("note")


def _without_code(inner: InsideView) -> str:
    """The GPU for which there is only PTX."""
    for name, capability in inner.gpus:
        archs = inner.architectures
        if archs and covers(archs, capability) and not covers_without_compiling(archs, capability):
            return f"{name} (sm_{capability[0]}{capability[1]})"
    return ""
