"""The device's own interface while the device is lost: streams, events, seeds, scalers and wrappers that do nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.amp.autocast_mode

from torchmedic.observe.context import Notes
from torchmedic.replay.isolation.torch_state import replaced, same_modules
from torchmedic.replay.shadow.cpu_shadow import Shadow
from torchmedic.source.objects.living import live_modules

_SILENT = (
    "synchronize empty_cache ipc_collect set_device manual_seed manual_seed_all seed seed_all set_rng_state "
    "set_rng_state_all set_stream reset_peak_memory_stats reset_accumulated_memory_stats init _lazy_init "
    "set_per_process_memory_fraction"
).split()
_COLLECTIVE = (
    "all_reduce broadcast reduce barrier all_gather_into_tensor reduce_scatter_tensor broadcast_object_list"
).split()
_LEGACY = "FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor ByteTensor BoolTensor"


_GENERATOR = torch.Generator


class Nothing:
    """A stream, an event, a graph: whatever is asked of it is done at once, and is nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return None


def quiet_cuda() -> list[tuple[Any, str, Any]]:
    """What `torch.cuda` answers without a device: owner, name and value."""
    kinds = ("Stream", "Event", "ExternalStream", "stream", "device", "device_of")
    return [
        *((torch.cuda, name, _nothing) for name in _SILENT),
        *((torch.cuda, name, Nothing) for name in kinds),
        *((torch.cuda, name, lambda *args, **kwargs: Nothing()) for name in ("current_stream", "default_stream")),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (torch.Tensor, "record_stream", _nothing),
        (torch, "Generator", _Generator),
    ]


@contextlib.contextmanager
def shaded(shadow: Shadow, notes: Notes) -> Iterator[None]:
    """One replay in the shadow: with the random numbers of the step as far as they were drawn on the CPU."""
    __import__("torch._dynamo")  # modes load it at some point, and it must not find our answers
    rng = torch.get_rng_state()
    shadow.forget_gradients()
    try:
        if notes.rng is not None:
            torch.set_rng_state(notes.rng)
        with _without_device(shadow), shadow:
            yield
    finally:
        torch.set_rng_state(rng)


@contextlib.contextmanager
def _without_device(shadow: Shadow) -> Iterator[None]:
    """Everything in reach that names the device answers from the CPU, until the end of the block."""
    cuda = torch.cuda
    answers = [
        *quiet_cuda(),
        (cuda, "get_rng_state_all", list),
        (cuda, "mem_get_info", lambda *args, **kwargs: (1 << 40, 1 << 40)),
        (torch.autograd.Function, "apply", classmethod(_applied(shadow, vars(torch.autograd.Function)["apply"]))),
        (torch.amp.autocast_mode.autocast, "__init__", _on_cpu(torch.amp.autocast_mode.autocast.__init__)),
    ]
    answers += [(cuda, name, getattr(torch, name)) for name in _LEGACY.split() if hasattr(torch, name)]
    if torch.distributed.is_available():
        answers += [(torch.distributed, name, _nothing) for name in _COLLECTIVE]
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            if name in vars(owner) or hasattr(owner, name):
                stack.enter_context(replaced(owner, name, value))
        yield


@contextlib.contextmanager
def standing_in(shadow: Shadow) -> Iterator[None]:
    """Every module that lives holds stand-ins in place of what it lost, so that whoever looks at it sees those."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    modules = live_modules()
    for module in modules:
        tables: tuple[Any, ...] = (module.__dict__.get("_parameters"), module.__dict__.get("_buffers"), module.__dict__)
        for table in tables:
            for name, value in list(table.items()) if isinstance(table, dict) else ():
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    swapped.append((table, name, value))
    # Weights first: what is not one of them by then is data.
    for table, name, value in swapped:
        table[name] = shadow.stand_in(value)
    shadow.others.clear()  # buffers and constants of modules are no data either
    try:
        with same_modules(modules):  # a replay leaves marks on them
            yield
    finally:
        for table, name, value in swapped:
            table[name] = value


class _AnyGenerator(type):
    """Tells what a generator is by the real class, which ours stands in for."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_AnyGenerator):
    """Generators of a device that is not there are generators of the host."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _GENERATOR()


def _applied(shadow: Shadow, original: Any) -> Callable[..., Any]:
    """A custom Function is called past the mode: autograd would tie its result to the lost tensors.

    `original` is a class method, written in Python before torch 2.15 and in C since.
    """

    @functools.wraps(torch.autograd.Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = [shadow.stand_in(value) if isinstance(value, torch.Tensor) else value for value in args]
        result = original.__get__(None, cls)(*given, **kwargs)
        if any(isinstance(value, torch.Tensor) and shadow.is_invented(value) for value in given):
            shadow.mark(result if isinstance(result, tuple) else (result,))
        return result

    return apply


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str = "cpu", *args: Any, **kwargs: Any) -> None:
        original(self, "cpu", *args, **kwargs)

    return __init__
