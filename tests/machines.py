"""Machines that no test has at hand, as stand-ins: torch is made to say what it says there, from its own code.

`# on: name` in a page, or `placed_on` in a test, puts a script on one of them. The stand-in is loaded on the script's
first line, so that its lines keep their numbers. What it raises comes out of frames that look like torch's.
"""

from __future__ import annotations

_COMMON = """
import os
import torch

_MAIN = os.getpid()


class AcceleratorError(getattr(torch, "AcceleratorError", RuntimeError)):
    pass


def fail(text, code=None):
    error = AcceleratorError(text) if code is not None else RuntimeError(text)
    if code is not None:
        error.error_code = code
    raise error


def is_cuda(*given):
    return any(str(each).startswith("cuda") for each in given)


def moving(to, cuda):
    \"\"\"Tensors and modules that are sent to a card stay where they are, if `cuda` lets them.\"\"\"

    def moved(self, *args, **kwargs):
        if is_cuda(*args, *kwargs.values()):
            cuda(*args, *kwargs.values())
            return self
        return to(self, *args, **kwargs)

    return moved


def refusing(text, code=None):
    \"\"\"A card that takes tensors, and whose first matrix product fails.\"\"\"
    sent = []
    linear = torch.nn.functional.linear

    def refused(*args, **kwargs):
        return fail(text, code) if sent else linear(*args, **kwargs)

    torch.nn.functional.linear = refused
    a_card(1, lambda *given: sent.append(given))


def a_card(count=1, cuda=lambda *given: None):
    torch.version.cuda = "12.6"
    torch.cuda.device_count = lambda: count
    torch.cuda.is_available = lambda: count > 0
    torch.Tensor.to = moving(torch.Tensor.to, cuda)
    torch.nn.Module.to = moving(torch.nn.Module.to, cuda)
    torch.Tensor.cuda = lambda self, device="cuda": self.to(device)
    torch.nn.Module.cuda = lambda self, device="cuda": self.to(device)
"""

_TAIL = (
    "\\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"
)

MACHINES = {
    "old driver": """
a_card(0, lambda *given: fail(
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"))
""",
    "build for CUDA without a driver": """
a_card(0, lambda *given: fail("CUDA error: CUDA driver version is insufficient for CUDA runtime version", 35))
""",
    "updated driver": """
a_card(0, lambda *given: fail(
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 803: system has unsupported display driver / cuda driver combination"))
""",
    "old gpu": f"""
refusing("CUDA error: no kernel image is available for execution on the device{_TAIL}", 209)
torch.cuda.get_device_capability = lambda device=None: (6, 1)
torch.cuda.get_device_name = lambda device=None: "NVIDIA GeForce GTX 1080 Ti"
torch.cuda.get_arch_list = lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
""",
    "one gpu": f"""
def ordinal(*given):
    if any(str(each) not in ("cuda", "cuda:0") and is_cuda(each) for each in given):
        fail("CUDA error: invalid device ordinal{_TAIL}", 101)


a_card(1, ordinal)
""",
    "full gpu": """
refusing("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
torch.cuda.mem_get_info = lambda device=None: (12 << 20, 80 << 30)
torch.cuda.memory_reserved = lambda device=None: 79 << 30
""",
    "gpu without this convolution": """
refusing("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.")
torch.cuda.mem_get_info = lambda device=None: (40 << 30, 80 << 30)
""",
    "host that pins no more": f"""
def pin_memory(self, device=None):
    fail("CUDA error: out of memory{_TAIL}", 2)


def empty(*args, pin_memory=False, **kwargs):
    return fail("CUDA error: out of memory{_TAIL}", 2) if pin_memory else _empty(*args, **kwargs)


_empty = torch.empty
torch.empty = empty
torch.Tensor.pin_memory = pin_memory
torch.cuda.mem_get_info = lambda device=None: (70 << 30, 80 << 30)
torch.cuda.current_device = lambda: 0
if hasattr(torch, "accelerator"):
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda device: None
a_card(1)
""",
    "sandbox that refuses": """
def zeros(*size, **kwargs):
    nbytes = 4 * torch.Size(size).numel()
    if nbytes < 1 << 30:
        return _zeros(*size, **kwargs)
    fail(f"[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
         f"allocate {nbytes} bytes. Error code 12 (Cannot allocate memory)")


_zeros = torch.zeros
torch.zeros = zeros
""",
    "started before the fork": """
torch.cuda._is_in_bad_fork = lambda: os.getpid() != _MAIN
torch.cuda.init = lambda: [call() for call, _ in torch.cuda._queued_calls]
""",
}


def placed_on(machine: str, source: str) -> str:
    """A script with a machine under it."""
    code = _COMMON + MACHINES[machine]
    file = "/torch-stand-in/site-packages/torch/recorded.py"
    return f"exec(compile({code!r}, {file!r}, 'exec'), {{'__name__': 'torch.recorded'}}); {source}"
