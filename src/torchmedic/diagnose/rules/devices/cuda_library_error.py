"""A CUDA library (most often cuBLAS or cuDNN) reported an error.

What: NVIDIA libraries compute matrix products and convolutions, and report a status. The status says what failed, but
not why: no memory for a handle or a workspace, an unsupported size, stride or dtype, a library version that torch does
not expect.

Why: the memory is used up (these libraries allocate outside the allocator of torch, so their failure looks like another
error); a tensor with more than 2**31 elements or with unusual strides; a second copy of the library, found through
LD_LIBRARY_PATH before the copy of torch. After a device-side assert or an illegal access the libraries fail as well;
the diagnosis then reports the original fault.

Cure: leave memory free (a smaller batch, no second process on the GPU), make the tensors contiguous or smaller, and let
torch load its own copies of the libraries.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

import torch

from torchmedic.detect.failures.device_errors import DeviceFault, device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.diagnose.words.format import listed, size
from torchmedic.diagnose.words.tensors import dtype, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.operations import storage_of
from torchmedic.source.lookup.failing_call import Argument

_MIN_FREE_BYTES = 256 << 20  # bytes: less than the handle and workspace of cuBLAS, or a plan of cuDNN, may ask for
_MAX_ELEMENTS = 2**31 - 1  # elements that these libraries count
_NAMES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "library": "a CUDA library"}


@rule("TM316", "cuda-library-error")
def check(evidence: RaisedEvidence) -> Draft | None:
    fault = device_fault_of(evidence.error)
    if fault is None or fault.kind not in _NAMES or not evidence.is_torchs:
        return None
    library = _NAMES[fault.kind]
    tensors = _given(evidence)
    draft = (
        _out_of_memory(evidence, fault, library)
        or _foreign(evidence, fault, library)
        or _unusual(evidence, fault, library, tensors)
        or _untold(evidence, fault, library)
    )
    draft.at(*raised_at(evidence, fault.name or "refused here"))
    draft.because(f"{fault.words[:200]}")
    return draft.because(f"it was given {listed([_described(each) for each in tensors], 3)}" if tensors else "")


def _given(evidence: RaisedEvidence) -> list[Argument]:
    """The tensors of the operation, each once, under the name that the user has for it."""
    found: dict[tuple[object, ...], Argument] = {}
    for call in reversed(evidence.calls):
        for argument in call.tensors:
            tensor = argument.value
            key = (storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            found.setdefault(key, argument)
    return list(found.values())


def _described(argument: Argument) -> str:
    tensor = argument.value
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"`{argument.text}` {shape(tensor)} of {dtype(tensor)}{strides}"


def _out_of_memory(evidence: RaisedEvidence, fault: DeviceFault, library: str) -> Draft | None:
    """No memory was left for the library's own handle or workspace."""
    if not re.search(r"ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR", fault.name):
        return None
    free, total = _memory()
    if free is None or total is None or free > _MIN_FREE_BYTES:
        return None
    mine = torch.cuda.memory_reserved()
    draft = check.draft(evidence, "proven" if "ALLOC_FAILED" in fault.name else "likely")
    draft.message = f"{library} found no memory left: {size(free)} of {size(total)} are free on the GPU"
    draft.cause = f"{library} asks for memory of its own, beside what torch has set aside"
    draft.because(
        f"torch has {size(mine)} of it set aside, other processes and CUDA {size(max(total - free - mine, 0))}"
    )
    draft.help("leave memory free: a smaller batch, or no other process on this GPU")
    draft.help("make torch set aside less: `torch.cuda.set_per_process_memory_fraction(0.9)`")
    return draft


def _memory() -> tuple[int | None, int | None]:
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    return None, None


def _foreign(evidence: RaisedEvidence, fault: DeviceFault, library: str) -> Draft | None:
    """The library that this process has loaded is not the one that torch came with."""
    name = {"cublas": "libcublas", "cudnn": "libcudnn"}.get(fault.kind)
    if name is None or not re.search(
        r"INVALID_VALUE|NOT_INITIALIZED|NOT_SUPPORTED|INTERNAL_ERROR|MISMATCH", fault.name
    ):
        return None
    loaded = sorted(set(_loaded(name)))
    home = str(Path(torch.__file__).parent.parent)
    strange = [path for path in loaded if not path.startswith(home)]
    bundled = any(Path(home).glob(f"nvidia/*/lib/{name}*.so*")) or any(Path(home).glob(f"torch/lib/{name}*.so*"))
    if not strange or not bundled:
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"{library} was loaded from {strange[0]}, not from the installation of torch"
    draft.cause = (
        f"torch was built with the {library} that it brings along; another version may not take what torch asks of it"
    )
    draft.help("take the folder of that library out of LD_LIBRARY_PATH")
    return draft


def _loaded(name: str) -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return re.findall(rf"(/\S*{name}(?:Lt)?\.so\S*)", maps)


def _unusual(evidence: RaisedEvidence, fault: DeviceFault, library: str, tensors: list[Argument]) -> Draft | None:
    """A tensor that is larger than the library counts, or that does not lie in memory as it wants."""
    if not re.search(r"NOT_SUPPORTED|INVALID_VALUE|BAD_PARAM|EXECUTION_FAILED", fault.name):
        return None
    large = [each for each in tensors if math.prod(each.value.shape) > _MAX_ELEMENTS]
    if large:
        draft = check.draft(evidence, "likely")
        draft.message = f"{library} refused `{large[0].text}`, which has more than 2**31 elements"
        draft.cause = f"`{large[0].text}` {shape(large[0].value)} has {math.prod(large[0].value.shape)} elements"
        draft.help("split the batch, so that no tensor of this operation has more than 2**31 - 1 elements")
        return draft
    loose = [each for each in tensors if not each.value.is_contiguous()]
    if not loose:
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"{library} refused `{loose[0].text}`, which does not lie in memory in one piece"
    draft.cause = f"`{loose[0].text}` {shape(loose[0].value)} has strides {list(loose[0].value.stride())}"
    draft.help(f"give it a copy in one piece: `{loose[0].text}.contiguous()`")
    return draft


def _untold(evidence: RaisedEvidence, fault: DeviceFault, library: str) -> Draft:
    free, total = _memory()
    draft = check.draft(evidence, "possible", f"{library} failed with {fault.name or 'an error'}", fault.words[:200])
    if free is not None and total is not None:
        draft.because(f"the device still answers, and {size(free)} of its {size(total)} are free")
    return draft
