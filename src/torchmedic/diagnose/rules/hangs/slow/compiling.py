"""Code is being compiled; the run is not hung.

What: the main thread is inside a compiler (torch.compile, Triton, a C++ or CUDA extension) or waits for a compiler that
is working. No step ends in the meantime, and nothing is printed.

Why: a model is compiled at its first call, again for every new shape or branch, and a second time for backward. This
takes seconds to tens of minutes; extensions take minutes.

Cure: wait. `mark_dynamic` or equal shapes avoid recompilation; keep the caches of Inductor and of extensions
(`TORCHINDUCTOR_CACHE_DIR`, `TORCH_EXTENSIONS_DIR`) on a persistent disk to make the next start shorter.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import caller_of, demand, frames_in, native
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import BUSY, IDLE, at, descendants, main_line, stall_rule
from torchmedic.records.inside import PyFrame
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall

# Files in which a thread is only while something is compiled, never when compiled code runs.
_COMPILERS = {
    "torch/_dynamo/convert_frame.py": "torch.compile",
    "torch/_inductor/compile_worker/": "torch.compile",
    "torch/_inductor/graph.py": "torch.compile",
    "torch/_inductor/scheduler.py": "torch.compile",
    "torch/_inductor/codegen/": "torch.compile",
    "torch/_inductor/codecache.py": "torch.compile",
    "torch/_inductor/async_compile.py": "torch.compile",
    "torch/_inductor/fx_passes/": "torch.compile",
    "torch/_functorch/_aot_autograd/graph_c": "torch.compile",
    "torch/utils/cpp_extension.py": "torch.utils.cpp_extension",
    "torch/jit/_script.py": "torch.jit.script",
    "torch/jit/_recursive.py": "torch.jit.script",
    "torch/export/": "torch.export",
    "/triton/compiler/": "Triton",
    "/triton/runtime/build.py": "Triton",
    "/numba/core/": "Numba",
    "/cupy/cuda/compiler.py": "CuPy",
}
_MIN_WAKES_PER_SECOND = 5.0  # times a second that a thread runs, however short: who waits for another one sleeps
_WAITS_FOR_LOCK = ("torch/utils/file_baton.py", "/filelock/")
_TOOLS = re.compile(
    r"cc1(plus)?|c\+\+|g\+\+(-\d+)?|gcc(-\d+)?|clang(\+\+)?(-\d+)?|nvcc|cicc|ptxas|cudafe\+\+|nvlink|fatbinary|ninja"
    r"|collect2|ld(\.\w+)?|hipcc"
)


@stall_rule("TM550", "compiling")
def check(stall: Stall) -> Draft | None:
    main = stall.thread
    if main is None or frames_in(main, *_WAITS_FOR_LOCK) is not None:
        return None
    found = frames_in(main, *_COMPILERS)
    tools = [process for process in descendants(stall) if _compiles(process)]
    if found is None and not tools:
        return None
    row = native(stall.view, main)
    wakes = row is not None and (row.wakes or 0.0) > _MIN_WAKES_PER_SECOND
    works = main.moved or wakes or demand(row) > BUSY or any(tool.demand > IDLE for tool in tools)
    if not works or (found is None and demand(row) > BUSY):
        return None  # a compiler that nobody waits for is no reason
    what = f" by {_what(found)}" if found is not None else ""
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: code is being compiled{what}, for {duration(stall.still)} so far"
    draft.cause = "no step can end before the compilation ends"
    line = caller_of(main, found) if found is not None else None
    draft.at(at(line, "cause", "compiled at this call") or main_line(stall, "cause", "compiled at this call"))
    names = sorted({tool.name or tool.command[0] for tool in tools})
    draft.because(f"at work: {', '.join(names)}" if names else "")
    inner = stall.inner
    if inner is not None and inner.compiles:
        times = ", ".join(duration(seconds) for seconds in inner.compiles[-4:])
        draft.because(f"compiled {len(inner.compiles)} times before, which took {times}")
    draft.help("wait; a cache folder on a persistent disk (`TORCHINDUCTOR_CACHE_DIR`) makes the next start shorter")
    return draft.rated("note")


def _what(frame: PyFrame) -> str:
    return next(words for part, words in _COMPILERS.items() if part in frame.file)


def _compiles(process: ProcessView) -> bool:
    if any("_inductor/compile_worker" in word for word in process.command):
        return process.demand > IDLE
    return _TOOLS.fullmatch(process.name) is not None
