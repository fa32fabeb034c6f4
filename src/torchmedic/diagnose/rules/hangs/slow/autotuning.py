"""Kernels are timed to find the fastest; the run is not hung.

What: before a kernel is used for the first time, several ways to compute it are run and timed: by cuDNN
(`torch.backends.cudnn.benchmark`), by torch.compile (`mode="max-autotune"`) or by Triton (`@triton.autotune`).

Why: this is done for every new shape. With many shapes (sequences or images of different sizes) it seems endless.

Cure: wait, if it is the first step. If it repeats: pad to a few shapes, or switch it off.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import caller_of, demand, frames_in, native
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import BUSY, at, main_line, stall_rule, stands
from torchmedic.records.inside import PyFrame, PyThread
from torchmedic.records.stall import Stall

_FILES = {
    "torch/_inductor/select_algorithm.py": "torch.compile",
    "torch/_inductor/autotune_process.py": "torch.compile",
    "torch/_inductor/runtime/": "torch.compile",
    "triton/runtime/autotuner.py": "Triton",
    "triton/testing.py": "Triton",
}
# They do other things as well; these functions of theirs try kernels out.
_TUNES = re.compile(r"bench|autotun|_tuning$|^kernel_call$")


@stall_rule("TM552", "autotuning")
def check(stall: Stall) -> Draft | None:
    main, inner = stall.thread, stall.inner
    if main is None or inner is None:
        return None
    frame, who = _tuner(main)
    busy = demand(native(stall.view, main)) > BUSY or inner.device_busy or main.moved
    if frame is None and inner.tunes and inner.device_busy is not None and stands(inner) and _convolves(main, stall):
        who = "cuDNN"
    if not who or not busy:
        return None
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: {who} times kernels to find the fastest, for {duration(stall.still)} so far"
    draft.cause = "the fastest one is chosen before the first use, and once more for every new shape"
    line = caller_of(main, frame) if frame is not None else None
    draft.at(at(line, "cause", "tuned at this call") or main_line(stall, "cause", "tuned at this call"))
    draft.because("torch.backends.cudnn.benchmark is on" if who == "cuDNN" else "")
    draft.help("wait; if it repeats for every new shape, pad to a few shapes or switch it off")
    return draft.rated("note")


def _tuner(main: PyThread) -> tuple[PyFrame | None, str]:
    for frame in main.frames:
        for part, who in _FILES.items():
            if part in frame.file and _TUNES.search(frame.function):
                return frame, who
    return None, ""


def _convolves(main: PyThread, stall: Stall) -> bool:
    """Whether a convolution can be under way: it is called, or its backward may be."""
    inside = frames_in(main, "torch/nn/modules/conv.py") is not None
    line = main.user_frame
    return inside or (line is not None and "conv" in line.code) or stall.phase == "backward"
