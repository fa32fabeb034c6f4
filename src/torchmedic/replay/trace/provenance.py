"""Where the graph of a loss was cut: the call that took tensors with a gradient and gave back none."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.spots import user_spots

_GATHERS = ("all_gather", "all_gather_single", "all_gather_into_tensor")
_LEAVES_TORCH = frozenset("item tolist numpy __float__ __int__ __array__ __index__ __bool__".split())


class FunctionCall(NamedTuple):
    """One call of torch's Python API."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    had_grad: bool  # some input required a gradient
    keeps_grad: bool  # some output does
    grad_enabled: bool
    inference: bool
    stack: tuple[Spot, ...]  # user lines, innermost first
    plain: Any = None  # the number, list or array that it gave instead of a tensor
    sets_data: bool = False  # `x.data = ...`

    @property
    def spot(self) -> Spot | None:
        return self.stack[0] if self.stack else None

    @property
    def lost(self) -> torch.Tensor | None:
        """The first result without a graph."""
        return next((tensor for tensor in self.outputs if not tensor.requires_grad), None)

    @property
    def is_cut(self) -> bool:
        return self.had_grad and not self.keeps_grad and not self.sets_data


class Provenance(TorchFunctionMode):
    """Remembers which call made which tensor. Holds every tensor of the step: for replays of the forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self._made_by: dict[int, int] = {}
        self._written_by: dict[int, int] = {}  # by address of the memory, for wrappers that torch does not show
        self._first_read: dict[int, int] = {}
        self._before: dict[tuple[int, int], int] = {}  # by tensor and call in place: the call that made it before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        is_gather = name in _GATHERS and len(args) > 1  # then the first argument is the result
        inputs = _tensors(args[1] if is_gather else (args, kwargs))
        had_grad = any(tensor.requires_grad for tensor in inputs)
        grad_enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        result = func(*args, **kwargs)
        outputs = _tensors(args[0] if is_gather else result)
        sets_data = name == "data" and getattr(func, "__name__", "") == "__set__"
        is_skipped = name in _SKIPPED and func is not torch.autograd.grad  # `x.grad` has that name too
        if is_skipped or not (outputs or name in _LEAVES_TORCH or sets_data):
            return result
        keeps_grad = any(tensor.requires_grad for tensor in outputs)
        stack = user_spots(sys._getframe(1))
        number = len(self.calls)
        for tensor in inputs:
            self._first_read.setdefault(id(tensor), number)
        plain = result if name in _LEAVES_TORCH else None
        self.calls.append(
            FunctionCall(name, inputs, outputs, had_grad, keeps_grad, grad_enabled, inference, stack, plain, sets_data)
        )
        written = (name.endswith("_") or name.startswith("__i")) and name != "requires_grad_"
        for tensor in outputs:
            if written or not any(tensor is given for given in inputs):
                if id(tensor) in self._made_by and not is_gather:  # which writes all of it
                    self._before[id(tensor), number] = self._made_by[id(tensor)]
                self._made_by[id(tensor)] = number
                address = _address(tensor)
                if address is not None:
                    self._written_by[address] = number
        return result

    def maker_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the call that made a tensor, or of the last one that made a tensor in the same memory."""
        number = self._made_by.get(id(tensor))
        if number is not None:
            return number
        address = _address(tensor)
        number = self._written_by.get(address) if address is not None else None
        # What was read before the memory was made anew was there before: the call made a view of it.
        return number if number is not None and number < self._first_read.get(id(tensor), len(self.calls)) else None

    def behind(self, root: torch.Tensor) -> list[FunctionCall]:
        """The calls that a tensor was computed by, the nearest first."""
        return [self.calls[number] for number in sorted(self._ways(root), reverse=True)]

    def _ways(self, root: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """By their numbers, the calls that a tensor was computed by, with those of their results that lead to it."""
        found: dict[int, list[torch.Tensor]] = {}
        pending = [(root, self.maker_of(root))]
        while pending:
            tensor, number = pending.pop()
            if number is None or any(tensor is known for known in found.get(number, ())):
                continue
            if number not in found:
                pending.extend(
                    (given, self.maker_of(given)) for given in self.calls[number].inputs if given is not tensor
                )
            found.setdefault(number, []).append(tensor)
            pending.append((tensor, self._before.get((id(tensor), number))))
        return found

    def sources_behind(self, root: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that a tensor was computed from and that no call of the step made."""
        given = [tensor for call in self.behind(root) for tensor in call.inputs]
        unmade = {id(tensor): tensor for tensor in given if self.maker_of(tensor) is None}
        return list(unmade.values())

    def cuts_behind(self, root: torch.Tensor) -> list[FunctionCall]:
        """The cuts on the way from the parameters to a tensor, the nearest to it first.

        A call may cut one of its results off and not another: the indices of a maximum, not its values.
        """
        cuts = []
        for number, results in sorted(self._ways(root).items(), reverse=True):
            call = self.calls[number]
            lost = call.had_grad and not call.sets_data and not any(tensor.requires_grad for tensor in results)
            if call.is_cut or lost:
                cuts.append(call)
        return cuts

    def left_torch(self, root: torch.Tensor) -> list[FunctionCall]:
        """Calls that turned a tensor which came from parameters into plain numbers, the likeliest one first.

        That is the one whose number stands in what the root was built from; else the last one before it was built.
        """
        built = self.made_plain(root)
        end = next((number for number, call in enumerate(self.calls) if call is built), len(self.calls))
        found = [
            (number, call)
            for number, call in enumerate(self.calls[:end])
            if call.name in _LEAVES_TORCH and (call.had_grad or any(self.cuts_behind(tensor) for tensor in call.inputs))
        ]
        values = _numbers(built.outputs[0]) if built is not None else set()
        found.sort(key=lambda pair: (not values.isdisjoint(_numbers(pair[1].inputs[0])), pair[0]), reverse=True)
        return [call for _, call in found]

    def made_plain(self, root: torch.Tensor) -> FunctionCall | None:
        """The call that built a tensor behind `root` from plain numbers."""
        return next((call for call in self.behind(root) if not call.inputs and call.outputs), None)


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in tree_iter(values) if isinstance(value, torch.Tensor))


def _numbers(tensor: torch.Tensor) -> set[float]:
    """The values of a small tensor, as a float32 would hold them."""
    if tensor.numel() > 64 or tensor.device.type != "cpu" or tensor.is_complex():
        return set()
    return set(tensor.detach().float().flatten().tolist())


_SKIPPED = frozenset(
    "__get__ shape size dim dtype device is_leaf grad grad_fn layout ndim numel is_cuda stride "
    "storage_offset is_contiguous is_floating_point is_complex element_size __len__ retain_grad _version".split()
)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        # A property such as `.data` arrives as the getter of its descriptor.
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None  # no memory of its own: fake, sparse, wrapped
