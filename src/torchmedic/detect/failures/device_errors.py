"""What the driver, the runtime or one of CUDA's libraries said, as a kind that the rules can ask for.

A device reports a fault as a number. Torch passes it on as `AcceleratorError.error_code` (since 2.8), as the name that
is to be searched for (since 2.9), and always as the runtime's own words. All three are read here, the surest first.
HIP has the same numbers and nearly the same words. Nothing is asked of the device, and torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

Kind = Literal[
    "device_assert",
    "illegal_address",
    "misaligned_address",
    "launch_failure",
    "launch_timeout",
    "ecc",
    "hardware",
    "out_of_memory",
    "cublas",
    "cudnn",
    "library",
    "no_kernel_image",
    "insufficient_driver",
    "invalid_ordinal",
    "not_available",
    "initialization",
    "capture",
    "other",
]

# After one of these the CUDA context is lost: every later call to the device fails with the same words.
_STICKY: frozenset[Kind] = frozenset(
    ["device_assert", "illegal_address", "misaligned_address", "launch_failure", "launch_timeout", "ecc", "hardware"]
)


class _Known(msgspec.Struct, frozen=True):
    """An error of the CUDA runtime: its number, its name, its words."""

    code: int
    name: str
    words: str
    kind: Kind


_RUNTIME = (
    _Known(710, "Assert", "device-side assert triggered", "device_assert"),
    _Known(700, "IllegalAddress", "an illegal memory access was encountered", "illegal_address"),
    _Known(716, "MisalignedAddress", "misaligned address", "misaligned_address"),
    _Known(719, "LaunchFailure", "unspecified launch failure", "launch_failure"),
    _Known(715, "IllegalInstruction", "an illegal instruction was encountered", "launch_failure"),
    _Known(717, "InvalidAddressSpace", "operation not supported on global/shared address space", "launch_failure"),
    _Known(718, "InvalidPc", "invalid program counter", "launch_failure"),
    _Known(702, "LaunchTimeout", "the launch timed out and was terminated", "launch_timeout"),
    _Known(214, "ECCUncorrectable", "uncorrectable ECC error encountered", "ecc"),
    _Known(714, "HardwareStackError", "hardware stack error", "hardware"),
    _Known(220, "NvlinkUncorrectable", "uncorrectable NVLink error detected during the execution", "hardware"),
    _Known(226, "Contained", "Invalid access of peer GPU memory over nvlink or a hardware error", "hardware"),
    _Known(2, "MemoryAllocation", "out of memory", "out_of_memory"),
    _Known(
        209, "NoKernelImageForDevice", "no kernel image is available for execution on the device", "no_kernel_image"
    ),
    _Known(98, "InvalidDeviceFunction", "invalid device function", "no_kernel_image"),
    _Known(200, "InvalidKernelImage", "device kernel image is invalid", "no_kernel_image"),
    _Known(
        222,
        "UnsupportedPtxVersion",
        "the provided PTX was compiled with an unsupported toolchain",
        "insufficient_driver",
    ),
    _Known(
        35, "InsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version", "insufficient_driver"
    ),
    _Known(
        803,
        "SystemDriverMismatch",
        "system has unsupported display driver / cuda driver combination",
        "insufficient_driver",
    ),
    _Known(
        804,
        "CompatNotSupportedOnDevice",
        "forward compatibility was attempted on non supported HW",
        "insufficient_driver",
    ),
    _Known(101, "InvalidDevice", "invalid device ordinal", "invalid_ordinal"),
    _Known(100, "NoDevice", "no CUDA-capable device is detected", "not_available"),
    _Known(46, "DevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable", "initialization"),
    _Known(3, "InitializationError", "initialization error", "initialization"),
    _Known(802, "SystemNotReady", "system not yet initialized", "initialization"),
    _Known(900, "StreamCaptureUnsupported", "operation not permitted when stream is capturing", "capture"),
    _Known(901, "StreamCaptureInvalidated", "operation failed due to a previous error during capture", "capture"),
    _Known(904, "StreamCaptureUnjoined", "capturing stream has unjoined work", "capture"),
    _Known(905, "StreamCaptureIsolation", "dependency created on uncaptured work in another stream", "capture"),
    _Known(
        906,
        "StreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
        "capture",
    ),
    _Known(999, "Unknown", "unknown error", "other"),
)
_BY_CODE = {known.code: known for known in _RUNTIME}
_BY_NAME = {known.name: known for known in _RUNTIME}

# Who speaks, before what is said.
_SPEAKER = re.compile(
    r"\b(?:(?:CUDA|HIP)(?: driver)? error|cuda runtime error \(\d+\)|Triton Error \[(?:CUDA|HIP)\]"
    r"|from (?:cuda|hip)GetDeviceCount\(\)[^\n]*?Error \d+)\s*:|Cuda failure(?: \d+)?\b"
)
_SEARCHED = re.compile(r"Search for `(?:cuda|hip)Error(?P<name>\w+)'")
_NUMBERED = re.compile(r"\(?(?P<code>\d+)\)?\s*:?$")
_LIBRARY = re.compile(
    r"\b(?P<name>(?P<library>CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS|HIPSPARSE|HIPSOLVER)_STATUS_\w+|"
    r"(?P<fft>CUFFT|HIPFFT)_\w+|miopenStatus\w+)"
)
_LIBRARY_KINDS: dict[str, Kind] = {"CUBLAS": "cublas", "HIPBLAS": "cublas", "ROCBLAS": "cublas", "CUDNN": "cudnn"}

# What torch itself says, before the device was asked anything.
_TORCH: tuple[tuple[str, Kind], ...] = (
    ("Cannot re-initialize CUDA in forked subprocess", "initialization"),
    ("Torch not compiled with CUDA enabled", "not_available"),
    ("PyTorch is not linked with support for cuda devices", "not_available"),
    ("No CUDA GPUs are available", "not_available"),
    ("No HIP GPUs are available", "not_available"),
    ("Found no NVIDIA driver on your system", "not_available"),
    ("Attempting to deserialize object on a CUDA device", "not_available"),
    ("Cannot access accelerator device when none is available", "not_available"),
    ("NVIDIA driver on your system is too old", "insufficient_driver"),
    ("Attempting to deserialize object on CUDA device", "invalid_ordinal"),
    ("Invalid device id", "invalid_ordinal"),
    ("CUDA unknown error", "other"),
    ("cuDNN Frontend error", "cudnn"),
)


class DeviceFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a device, or of what stands between torch and the device."""

    kind: Kind
    words: str  # the line that says so
    code: int | None = None  # of the CUDA runtime, where it is known
    name: str = ""  # `cudaErrorAssert`, `CUBLAS_STATUS_ALLOC_FAILED`

    @property
    def sticky(self) -> bool:
        """Whether the device is lost to this process."""
        return self.kind in _STICKY

    @property
    def may_be_echo(self) -> bool:
        """Whether a library only says that something is wrong, as it also does after a fault of somebody else."""
        own = ("NOT_SUPPORTED", "INVALID_VALUE", "BAD_PARAM", "ARCH_MISMATCH", "INVALID_SIZE", "INVALID_TYPE")
        return self.kind in ("cublas", "cudnn", "library") and not any(word in self.name for word in own)


def device_fault_of(error: BaseException | None) -> DeviceFault | None:
    """The fault that an exception, or the one that it was raised from, reports; None where it is about no device."""
    return next((fault for each in _chain(error) if (fault := _fault(each)) is not None), None)


def is_sticky(error: BaseException | None) -> bool:
    """Whether the device is lost to this process: an exception of the chain says that its context is corrupted."""
    return any(fault.sticky for each in _chain(error) if (fault := _fault(each)) is not None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(seen) < 10:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _fault(error: BaseException) -> DeviceFault | None:
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names & {"RuntimeError", "AssertionError"}:
        return None
    text = str(error)
    if "OutOfMemoryError" in names:
        return DeviceFault(kind="out_of_memory", words=text.split("\n", 1)[0])
    return _by_code(error, text) or fault_in(text)


def fault_in(text: str) -> DeviceFault | None:
    """The fault that a text reports, where there is no more than its words."""
    return _by_library(text) or _by_words(text) or _by_torch(text)


def _by_code(error: BaseException, text: str) -> DeviceFault | None:
    code = getattr(error, "error_code", None)
    if not isinstance(code, int) or "AcceleratorError" not in {kind.__name__ for kind in type(error).__mro__}:
        return None
    spoken = _SPEAKER.search(text)
    known = _BY_CODE.get(code)
    return _runtime(known, code, _line(text, spoken))


def _by_library(text: str) -> DeviceFault | None:
    found = _LIBRARY.search(text)
    if found is None or "SUCCESS" in found["name"]:
        return None
    kind = _LIBRARY_KINDS.get(found["library"] or "", "library")
    return DeviceFault(kind=kind, words=_line(text, found), name=found["name"])


def _by_words(text: str) -> DeviceFault | None:
    """What the runtime says in words; its own numbers and names are surer, where they are given."""
    spoken = _SPEAKER.search(text)
    if spoken is None:
        return None
    searched, numbered = _SEARCHED.search(text), _NUMBERED.search(spoken[0])
    known = _BY_NAME.get(searched["name"]) if searched is not None else None
    if known is None:
        said = text[spoken.start() :].split("\n\n", 1)[0].lower()
        known = next((each for each in _RUNTIME if each.words.lower() in said), None)
    # Before CUDA 10.1 the numbers were others: they count only where the words say nothing.
    code = int(numbered["code"]) if known is None and numbered is not None else None
    if code is not None:
        known = _BY_CODE.get(code)
    fault = _runtime(known, code, _line(text, spoken))
    return (
        fault if searched is None or fault.name else msgspec.structs.replace(fault, name=f"cudaError{searched['name']}")
    )


def _by_torch(text: str) -> DeviceFault | None:
    for words, kind in _TORCH:
        at = text.find(words)
        if at >= 0:
            return DeviceFault(kind=kind, words=text[at:].split("\n", 1)[0])
    return None


def _runtime(known: _Known | None, code: int | None, line: str) -> DeviceFault:
    if known is None:
        return DeviceFault(kind="other", words=line, code=code)
    return DeviceFault(kind=known.kind, words=line, code=known.code, name=f"cudaError{known.name}")


def _line(text: str, found: re.Match[str] | None) -> str:
    """The line of a message that holds a match: the first one is often that of a wrapper."""
    at = found.start() if found is not None else 0
    begin = text.rfind("\n", 0, at) + 1
    line = text[begin:].split("\n", 1)[0].strip()
    return re.sub(r"^(?:\w+\.)*\w+(?:Error|Exception): ", "", line)
