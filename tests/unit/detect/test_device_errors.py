"""What the device said: recorded texts of torch 2.6 to 2.13 and their kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchmedic.detect.failures.device_errors import DeviceFault, device_fault_of, is_sticky

TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class AcceleratorError(RuntimeError):
    """As torch has it since 2.8."""

    error_code: int


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


RECORDED = {
    "assert": ("CUDA error: device-side assert triggered" + TAIL, "device_assert", 710),
    "assert, with its name": (
        "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/"
        "cuda-runtime-api/group__CUDART__TYPES.html for more information." + TAIL,
        "device_assert",
        710,
    ),
    "assert, words of a day to come": (
        "CUDA error: something new\nSearch for `cudaErrorAssert' in https://docs.nvidia.com" + TAIL,
        "device_assert",
        710,
    ),
    "assert, ten years old": (
        "cuda runtime error (59) : device-side assert triggered at /aten/src/THC/generic/THCTensorCopy.cu:100",
        "device_assert",
        710,
    ),
    "illegal address": ("CUDA error: an illegal memory access was encountered" + TAIL, "illegal_address", 700),
    "illegal address, triton": (
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "illegal_address",
        700,
    ),
    "illegal address, nccl": (
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.19.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 700 'an illegal memory access was encountered'",
        "illegal_address",
        700,
    ),
    "misaligned": ("CUDA error: misaligned address" + TAIL, "misaligned_address", 716),
    "launch failure": ("CUDA error: unspecified launch failure" + TAIL, "launch_failure", 719),
    "timeout": ("CUDA error: the launch timed out and was terminated" + TAIL, "launch_timeout", 702),
    "ecc": ("CUDA error: uncorrectable ECC error encountered" + TAIL, "ecc", 214),
    "hardware": ("CUDA error: hardware stack error" + TAIL, "hardware", 714),
    "memory": ("CUDA error: out of memory" + TAIL, "out_of_memory", 2),
    "memory, by the driver": ("CUDA driver error: out of memory", "out_of_memory", 2),
    "kernel image": (
        "CUDA error: no kernel image is available for execution on the device" + TAIL,
        "no_kernel_image",
        209,
    ),
    "hip": ("HIP error: invalid device function\nHIP kernel errors might be", "no_kernel_image", 98),
    "old driver": (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
        "insufficient_driver",
        None,
    ),
    "two drivers": (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
        "that might have already set an error? Error 803: system has unsupported display driver / cuda driver "
        "combination",
        "insufficient_driver",
        803,
    ),
    "ordinal": ("CUDA error: invalid device ordinal" + TAIL, "invalid_ordinal", 101),
    "ordinal of a checkpoint": (
        "Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1. Please use torch.load",
        "invalid_ordinal",
        None,
    ),
    "no card": ("No CUDA GPUs are available", "not_available", None),
    "busy": ("CUDA error: CUDA-capable device(s) is/are busy or unavailable" + TAIL, "initialization", 46),
    "checkpoint of a card": (
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running",
        "not_available",
        None,
    ),
    "fork": (
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "train.py", line 9, in __getitem__\nRuntimeError: Cannot re-initialize CUDA in forked subprocess. To '
        "use CUDA with multiprocessing, you must use the 'spawn' start method\n",
        "initialization",
        None,
    ),
    "cublas": (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cublas",
        None,
    ),
    "cudnn": ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a", "cudnn", None),
    "cusolver": ("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDn", "library", None),
    "cufft": ("cuFFT error: CUFFT_INTERNAL_ERROR", "library", None),
    "unknown": ("CUDA error: unknown error" + TAIL, "other", 999),
    "never heard of": ("CUDA error: the flux is reversed" + TAIL, "other", None),
}


@pytest.mark.parametrize(("text", "kind", "code"), RECORDED.values(), ids=RECORDED)
def test_texts(text: str, kind: str, code: int | None) -> None:
    fault = device_fault_of(RuntimeError(text))

    assert fault is not None
    assert (fault.kind, fault.code) == (kind, code)


def test_the_number_is_believed_before_the_words() -> None:
    error = AcceleratorError("CUDA error: (words of another language)" + TAIL)
    error.error_code = 700

    assert device_fault_of(error) == DeviceFault(
        kind="illegal_address",
        words="CUDA error: (words of another language)",
        code=700,
        name="cudaErrorIllegalAddress",
    )


def test_the_line_of_a_wrapped_error_is_its_own() -> None:
    fault = device_fault_of(RuntimeError(RECORDED["fork"][0]))

    assert fault is not None
    assert fault.words.startswith("Cannot re-initialize CUDA")


@pytest.mark.parametrize("kind", ["RuntimeError", "AssertionError"])
def test_a_build_without_cuda(kind: str) -> None:
    error = {"RuntimeError": RuntimeError, "AssertionError": AssertionError}[kind]
    fault = device_fault_of(error("Torch not compiled with CUDA enabled"))

    assert fault is not None
    assert fault.kind == "not_available"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("HTTP Error 404: not found"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x6 and 7x1)"),
        RuntimeError("out of memory"),
        ValueError("CUDA error: device-side assert triggered"),
        AssertionError(),
        KeyError("CUDA error"),
        None,
    ],
)
def test_other_errors_are_about_no_device(error: BaseException | None) -> None:
    assert device_fault_of(error) is None
    assert not is_sticky(error)


def test_out_of_memory_is_known_by_its_class() -> None:
    fault = device_fault_of(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))

    assert fault is not None
    assert fault.kind == "out_of_memory"
    assert not fault.sticky


def test_which_faults_lose_the_device() -> None:
    sticky = {name for name, (text, _, _) in RECORDED.items() if is_sticky(RuntimeError(text))}

    assert {RECORDED[name][1] for name in sticky} == {
        "device_assert",
        "illegal_address",
        "misaligned_address",
        "launch_failure",
        "launch_timeout",
        "ecc",
        "hardware",
    }


def test_which_words_of_a_library_may_be_an_echo() -> None:
    statuses = ["CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_SUPPORTED"]
    faults = [device_fault_of(RuntimeError(f"CUDA error: {status} when calling `f`")) for status in statuses]

    assert [fault.may_be_echo for fault in faults if fault is not None] == [True, True, False]


def test_the_fault_under_an_exception_of_the_users() -> None:
    outer = RuntimeError("training failed")
    outer.__cause__ = RuntimeError(RECORDED["illegal address"][0])

    fault = device_fault_of(outer)
    assert fault is not None
    assert fault.kind == "illegal_address"
    assert is_sticky(outer)


def test_a_library_error_while_a_fault_was_handled_is_sticky() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
    error.__context__ = RuntimeError(RECORDED["assert"][0])

    fault = device_fault_of(error)
    assert fault is not None
    assert (fault.kind, fault.may_be_echo) == ("cublas", True)
    assert is_sticky(error)


def test_torch_is_not_imported() -> None:
    program = "import sys; import torchmedic.detect.failures.device_errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
