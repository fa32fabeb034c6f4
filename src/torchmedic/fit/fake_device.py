"""A CUDA device that is not there: tensors on it are fake, and `torch.cuda` answers as if there were one.

A build of torch without CUDA has no device guard for CUDA tensors; autograd would end the process at the first one.
torch has a guard that does nothing, for builds with CUDA on a machine without a card. Here this guard is installed on
any build. In a build with CUDA, autograd also asks the CUDA runtime whether a device is in use. Without a card this
question raises; here the answer is no.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchmedic.errors import TorchmedicError
from torchmedic.fit.answers import WHOLE
from torchmedic.fit.cards import Card
from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.shadow.fake_cuda import Nothing, quiet_cuda

DEVICE = torch.device("cuda:0")
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # an array of pointers, by the number of the device type
_CUDA = 1  # the number of CUDA among the device types
_MAX_VIRTUALS = 64  # more than a device guard has virtual functions
_RUNTIME = "_ZN2at6detail12getCUDAHooksEv"  # a function that returns the object through which torch asks CUDA
_PLACES_OF_QUESTION = (4, 2, 3, 5, 6)  # virtual functions that may be "is the device in use?", by the version of torch
_MAX_RUNTIME_VIRTUALS = 128
_COUNTERS = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "utilization temperature power_draw"
).split()


class FakeMode(FakeTensorMode):
    """Fake tensors that never touch a device, on a machine that may have one."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        """A copied tensor belongs to the same mode; in another mode its views would not share its memory."""
        return self


def why_not() -> str:
    """Why this version of torch cannot pretend a device; empty where it can."""
    return "" if hasattr(torch._C, "_ensureCUDADeviceGuardSet") else "a newer version is needed"


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Install the guard that does nothing.

    `_ensureCUDADeviceGuardSet` does that only where a guard says that it has no devices. A build without CUDA has no
    guard, so one is put there for a moment: an object whose virtual functions all return 0.
    """
    reason = why_not()
    if reason:
        raise TorchmedicError(f"torch {torch.__version__} cannot pretend a CUDA device: {reason}")
    library = _library("libc10.so")
    try:
        registry = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, _REGISTRY)
    except ValueError:
        raise TorchmedicError(f"torch {torch.__version__} cannot pretend a CUDA device: unknown build") from None
    before = registry[_CUDA]
    zero = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    functions = (ctypes.c_void_p * _MAX_VIRTUALS)(*[address] * _MAX_VIRTUALS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(functions))
    registry[_CUDA] = ctypes.addressof(guard)
    try:
        torch._C._ensureCUDADeviceGuardSet()
        if registry[_CUDA] == ctypes.addressof(guard):
            raise TorchmedicError(f"torch {torch.__version__} cannot pretend a CUDA device: no guard was installed")
        yield
    finally:
        registry[_CUDA] = before


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


@contextlib.contextmanager
def _device_not_in_use() -> Iterator[None]:
    """Let autograd work with fake CUDA tensors in a build with CUDA on a machine without a card.

    The place of the question among the virtual functions depends on the version of torch. So a backward pass of one
    element tries the possible places.
    """
    if not torch.backends.cuda.is_built() or _backward_works():
        yield
        return
    get = getattr(_library("libtorch_cpu.so"), _RUNTIME)
    get.restype = ctypes.c_void_p
    functions = ctypes.c_void_p.from_address(get())
    before = functions.value
    assert before is not None
    no = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(lambda _runtime, _device: 0)
    changed = (ctypes.c_void_p * _MAX_RUNTIME_VIRTUALS)()
    try:
        for place in _PLACES_OF_QUESTION:
            ctypes.memmove(changed, before, ctypes.sizeof(changed))
            changed[place] = ctypes.cast(no, ctypes.c_void_p).value
            functions.value = ctypes.addressof(changed)
            if _backward_works():
                break
        else:
            raise TorchmedicError(f"torch {torch.__version__} cannot pretend a CUDA device: autograd asks for a card")
        yield
    finally:
        functions.value = before


def _backward_works() -> bool:
    with FakeMode(), torch.autograd.set_multithreading_enabled(False):
        loss = torch.empty(1, device=DEVICE, requires_grad=True) * 2
        try:
            loss.backward()
        except RuntimeError:
            return False
    return True


@contextlib.contextmanager
def pretended(card: Card) -> Iterator[None]:
    """Answer every question about CUDA as if this card were there, until the end of the block."""
    with _device_guard(), _kernels_of_a_card(), contextlib.ExitStack() as stack:
        for owner, name, value in _answers(card):
            if name in vars(owner) or hasattr(owner, name):
                stack.enter_context(replaced(owner, name, value))
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            types: list[Any] = importlib.import_module(module)._foreach_supported_types
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        # `torch.tensor(..., device="cuda")` makes its tensor on the host and moves it, where a mode can see it.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(_device_not_in_use())
        yield


@contextlib.contextmanager
def _kernels_of_a_card() -> Iterator[None]:
    """Tell a build without CUDA which operations a card carries out whole; it would take them apart otherwise."""
    library = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in WHOLE:
        if hasattr(torch.ops.aten, name) and not has_kernel(f"aten::{name}", "CUDA"):
            library.impl(name, _never_called, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _never_called(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("this kernel stands for one of a card")


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _answers(card: Card) -> list[tuple[Any, str, Any]]:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name=f"NVIDIA {card.name}",
        total_memory=card.memory,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.processors,
        is_integrated=0,
        is_multi_gpu_board=0,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        L2_cache_size=50 << 20,
    )
    found = [*quiet_cuda(), *((cuda, name, _always(0)) for name in _COUNTERS)]
    found += [
        (cuda, "is_available", _always(True)),
        (cuda, "is_initialized", _always(True)),
        (cuda, "device_count", _always(1)),
        (cuda, "is_bf16_supported", _always(card.capability[0] >= 8)),
        (cuda, "get_device_properties", _always(properties)),
        (cuda, "get_device_name", _always(properties.name)),
        (cuda, "get_device_capability", _always(card.capability)),
        (cuda, "get_rng_state_all", lambda: [torch.get_rng_state()]),
        (cuda, "mem_get_info", _always((card.memory, card.memory))),
        (cuda, "memory_stats", _always({})),
        (cuda, "memory_summary", _always("")),
        (torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self),
        (torch.Tensor, "is_pinned", _always(False)),
        (torch.backends.cudnn, "is_acceptable", _always(False)),
        (torch.backends.cudnn, "version", _always(91000)),
        (torch, "compile", _not_compiled),
    ]
    found += [(fake_tensor, name, _always(None)) for name in ("init_gpu_context", "init_cuda_context")]
    if hasattr(torch, "accelerator"):
        silent = ("synchronize", "set_device_index", "set_device_idx", "set_stream", "empty_cache")
        found += [(torch.accelerator, name, _always(None)) for name in silent]
        counts = ("current_device_index", "current_device_idx", "memory_allocated", "max_memory_allocated")
        found += [(torch.accelerator, name, _always(0)) for name in counts]
        found += [
            (torch.accelerator, "is_available", _always(True)),
            (torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda")),
            (torch.accelerator, "device_count", _always(1)),
            (torch.accelerator, "current_stream", lambda *args, **kwargs: Nothing()),
        ]
    return found


def _not_compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile` as a function and as a decorator; the code stays eager."""
    return model if model is not None else lambda each: each
