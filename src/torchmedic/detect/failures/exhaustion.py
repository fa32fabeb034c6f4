"""An exception that says: no memory. Where, and how much was asked for."""

from __future__ import annotations

import re

import msgspec

from torchmedic.detect.failures.device_errors import DeviceFault, fault_in
from torchmedic.observe.memory.host import host_memory
from torchmedic.observe.memory.limits import refusing

_UNITS = {
    "B": 1,
    "bytes": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "EiB": 1 << 60,
    "KB": 1 << 10,
    "MB": 1 << 20,
    "GB": 1 << 30,
}
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>bytes|B|[KMGTPE]i?B)"
_HOST_WORDS = ("DefaultCPUAllocator", "Storage size calculation overflowed", "std::bad_alloc", "Cannot allocate memory")
_NO_SPACE = "No space left on device"
# Memory that processes share, by the words of torch, of its manager and of NCCL, and by the names of their files.
_SHARED = re.compile(r"shared memory|\bshm\b|</torch_\d|/dev/shm|torch_shm_manager")
_SHARED_REFUSED = re.compile(rf"unable to allocate shared memory|unable to write to file </torch_|{_NO_SPACE}")
SHARED = "shared memory"
# oneDNN, which computes convolutions and products on the CPU, says the same whatever went wrong.
_ONEDNN = re.compile(r"could not (create|execute|initialize) a (primitive|memory|sub-memory)")
_LIBRARIES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "library": "a CUDA library"}


class Exhaustion(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes; None where the exception does not say.

    `where` is "host", "shared memory" or the kind of device. `beside` names who asked for memory of a device beside
    torch's own allocator, and so without its words: the driver, or a library. `others` are other processes on the
    device, known only where the driver could tell them from this one.
    """

    where: str
    beside: str = ""
    index: int | None = None
    asked: int | None = None
    capacity: int | None = None
    free: int | None = None
    allowed: int | None = None  # by `set_per_process_memory_fraction`
    allocated: int | None = None
    unallocated: int | None = None  # reserved, but not in use
    others: int | None = None
    other_processes: tuple[tuple[int, int], ...] = ()

    @property
    def on_device(self) -> bool:
        return self.where not in ("host", SHARED)


def exhaustion_of_error(error: BaseException) -> Exhaustion | None:
    """What an exception says about memory; None if it is about something else."""
    return exhaustion_of(frozenset(kind.__name__ for kind in type(error).__mro__), str(error))


def is_out_of_memory(error: BaseException) -> bool:
    return exhaustion_of_error(error) is not None


def exhaustion_of(kinds: frozenset[str], text: str) -> Exhaustion | None:
    """What the names of an exception's classes and its words say about memory; None if they say nothing of it."""
    if "OutOfMemoryError" in kinds or re.search(r"\b(CUDA|HIP|XPU|MPS) (backend )?out of memory", text):
        return _of_device(text)
    if kinds & {"RuntimeError", "OSError"} and _SHARED.search(text) and _SHARED_REFUSED.search(text):
        return Exhaustion(where=SHARED)
    fault = fault_in(text) if "RuntimeError" in kinds else None
    if fault is not None and (beside := _beside(fault, text)):
        index = re.search(r"\bcuda:(\d+)", text)
        return Exhaustion(where="cuda", beside=beside, index=int(index[1]) if index else None)
    if "MemoryError" in kinds or (
        kinds & {"RuntimeError", "OSError", "ImportError"} and any(word in text for word in _HOST_WORDS)
    ):
        return Exhaustion(where="host", asked=asked_of_host(text))
    return hidden_exhaustion(kinds, text)


def hidden_exhaustion(kinds: frozenset[str], text: str) -> Exhaustion | None:
    """What words of oneDNN mean that do not name memory: memory ran out if the process is at a limit for certain."""
    if "RuntimeError" not in kinds or not _ONEDNN.search(text):
        return None
    bound = refusing(host_memory(), None)
    return Exhaustion(where="host") if bound is not None and bound.certain else None


def _beside(fault: DeviceFault, text: str) -> str:
    """The part that had no memory, if a device fault is about that: the driver, or a library with memory of its own."""
    if fault.kind == "out_of_memory":
        return "NCCL" if "NCCL" in text else "Triton" if "Triton" in text else "the driver"
    return _LIBRARIES[fault.kind] if fault.kind in _LIBRARIES and re.search("ALLOC_?FAILED", fault.name) else ""


def asked_of_host(text: str) -> int | None:
    """The number of bytes that a refusal names."""
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        return int(found[1])
    if found := re.search(r"[Uu]nable to allocate ([\d.]+) (\w+)", text):
        return int(float(found[1]) * _UNITS.get(found[2], 0)) or None
    return None


def _of_device(text: str) -> Exhaustion:
    named = re.search(r"\b([A-Z]+) (backend )?out of memory", text)
    kind = named[1].lower() if named else "cuda"
    index = re.search(r"GPU (\d+)", text)
    this = _size(r"this process has " + _SIZE, text)
    others = [
        (int(found["pid"]), _bytes(found["use"], found["use_unit"]))
        for found in re.finditer(r"Process (?P<pid>\d+) has " + _SIZE.format("use"), text)
    ]
    return Exhaustion(
        where="cuda" if kind == "hip" else kind,
        index=int(index[1]) if index else None,
        asked=_size(r"[Tt]ried to allocate " + _SIZE, text),
        capacity=_size(r"total capacity of " + _SIZE, text),
        free=_size(r"of which " + _SIZE + r" is free", text),
        allowed=_size(_SIZE + r" allowed", text),
        allocated=_size(_SIZE + r" is allocated by PyTorch", text),
        unallocated=_size(_SIZE + r" is reserved by PyTorch but unallocated", text),
        others=sum(use for _, use in others) if this is not None else None,
        other_processes=tuple(others) if this is not None else (),
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern.format("use"), text)
    return _bytes(found["use"], found["use_unit"]) if found else None


def _bytes(number: str, unit: str) -> int:
    value = int(float(number) * _UNITS[unit])
    return value if value < 1 << 60 else 0  # a driver that cannot tell says 17179869184 GiB
