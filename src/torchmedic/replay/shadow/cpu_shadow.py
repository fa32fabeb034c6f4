"""A step run once more on the CPU when its device is lost: the real batch, stand-ins for what only the device held.

After a device-side assert nothing on the device can be read, but shapes, dtypes and everything on the host can. Every
request for a device is answered on the CPU, and every tensor of the device is replaced by a stand-in as soon as an
operation is given it. An index that comes from the batch is then out of range here as it was there, and the CPU says at
which line. Which values are invented is tracked, so that nobody takes them for the run's own.
"""

from __future__ import annotations

import collections
import copy
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchmedic.replay.shadow.invented_values import Inventor, is_big_product, pretend
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.spots import user_spots

_DEVICE = re.compile(r"(cuda|hip|xpu|mps|meta|privateuseone|hpu|npu)(:\d+)?")
_CPU = torch.device("cpu")
_CLAIMS = {"is_cuda": True, "is_cpu": False, "device": torch.device("cuda", 0)}
_MOVES = frozenset({"to", "cuda", "xpu", "npu"})
_DRAWS = frozenset("rand randn randint randperm normal rand_like randn_like randint_like bernoulli multinomial".split())
_MAX_OPERATIONS = 4000  # that are remembered


class Seen(NamedTuple):
    """An operation that a shadow ran through."""

    op: str
    spots: tuple[Spot, ...]  # the user's lines, innermost first
    index_invented: bool  # an input of it that can be an index was not the run's own value
    indexed: frozenset[int] = frozenset()  # sizes of what it was given beside whole numbers, which may be indices


class Shadow(TorchFunctionMode):
    """Answers on the CPU. Entered around every replay of a step whose device is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._originals: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that its id stays taken
        self._invented = WeakIdKeyDictionary()
        self._inventor = Inventor()
        self._constructors = _device_constructors()
        self.seen: list[Seen] = []
        self._failures: list[tuple[BaseException, Seen]] = []
        self.claims_device = False  # whether tensors say that they are on the device, for code that insists
        self.parameters = 0  # tensors replaced, by what they were
        self.others: list[torch.Tensor] = []  # neither parameters nor buffers: data that only the device had

    def begin(self, originals: dict[int, torch.Tensor]) -> None:
        """Start over, with host copies of some lost tensors, by the identity of the lost ones."""
        for key in [*self._originals, *originals]:
            self._known.pop(key, None)
        self._originals = originals
        self.seen.clear()
        self._failures.clear()
        self.others.clear()

    def failed(self, error: BaseException | None) -> Seen | None:
        """The operation that raised an exception, or the one that it was raised from."""
        for _ in range(10):
            for raised, seen in self._failures:
                if raised is error:
                    return seen
            error = None if error is None else error.__cause__ or error.__context__
        return None

    # Stand-ins

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the CPU that a lost one is answered with, the same one each time."""
        with torch._C.DisableTorchFunction():  # else the lost one itself would be answered for
            if tensor.device.type == "cpu" or type(tensor).__name__ == "FakeTensor":
                return tensor
            found = self._known.get(id(tensor))
            if found is None:
                found = self._known[id(tensor)] = (tensor, self._make(tensor))
            return found[1]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            original = self._originals.get(id(tensor))
            if original is not None:
                return original.clone()
            made = self._inventor.like(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            self.parameters += 1
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and (made.is_floating_point() or made.is_complex()):
            made.requires_grad_()
        if not isinstance(tensor, torch.nn.Parameter) and tensor.grad_fn is None:
            self.others.append(tensor)
        self._invented[made] = True
        return made

    def is_invented(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor depend on invented ones."""
        return tensor in self._invented

    def forget_gradients(self) -> None:
        for _, made in self._known.values():
            made.grad = None

    def answer(self, value: Any) -> Any:
        """A value as the CPU has it: the stand-in of a tensor, the CPU for a device."""
        if isinstance(value, torch.Tensor):
            return self.stand_in(value)
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, torch.Generator):
            return value if value.device.type == "cpu" else None
        if isinstance(value, str) and _DEVICE.fullmatch(value):
            return "cpu"
        return value

    def answer_variable(self, value: Any, depth: int = 3) -> Any:
        """A variable of the user as the CPU has it; a batch that holds tensors stays as it is."""
        if depth and type(value) in (dict, list, tuple):
            parts = value.values() if isinstance(value, dict) else value
            new = [self.answer_variable(part, depth - 1) for part in parts]
            if all(a is b for a, b in zip(parts, new, strict=True)):
                return value
            return dict(zip(value, new, strict=True)) if isinstance(value, dict) else type(value)(new)
        if depth and isinstance(value, collections.UserDict):
            twin = copy.copy(value)
            twin.data = self.answer_variable(dict(value.data), depth)
            return twin
        return self.answer(value)

    # Operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        drawn = name in _DRAWS and _asks_for_device(args[:1] and (None, *args), kwargs)
        moved = name in _MOVES and (name != "to" or _asks_for_device(args, kwargs))
        args, kwargs = tree_map(self.answer, (tuple(args), kwargs))
        if name == "__get__":
            if self.claims_device and (asked := getattr(func.__self__, "__name__", "")) in _CLAIMS:
                return _CLAIMS[asked]
            return func(*args, **kwargs)
        if name in ("pin_memory", "record_stream") and args:
            return args[0]
        if name == "get_device":
            return 0
        if moved:
            return self._moved(name, args, kwargs)
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _CPU
        if func in self._constructors and kwargs.get("device") is None:
            kwargs["device"] = _CPU  # else the default device would be asked
        kwargs.pop("pin_memory", None)
        result = self._run(func, name, args, kwargs)
        if drawn:
            self.mark([result])  # the device would have drawn others
        return result

    def _moved(self, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """`x.to("cuda")` is a copy on the CPU, as it is a copy on the device."""
        tensor: torch.Tensor = args[0]
        if name == "to":
            rest = [value for value in args[1:] if not isinstance(value, int | str | torch.device) or value is True]
            kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
            wanted = [value.dtype if isinstance(value, torch.Tensor) else value for value in rest]
            wanted += [kwargs.pop("other").dtype] if isinstance(kwargs.get("other"), torch.Tensor) else []
            for dtype in wanted:
                if isinstance(dtype, torch.dtype):
                    kwargs["dtype"] = dtype
            made = tensor.to(**kwargs) if kwargs else tensor
        else:
            made = tensor
        made = made.clone() if made is tensor else made
        if self.is_invented(tensor):
            self._invented[made] = True
        return made

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        invented = any(tensor in self._invented for tensor in tensors)
        whole = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        index_invented = any(tensor in self._invented for tensor in whole)
        others = [tensor for tensor in tensors if tensor.is_floating_point()] if whole else []
        indexed = frozenset(size for tensor in others for size in tensor.shape)
        seen = Seen(name, user_spots(sys._getframe(2)), index_invented, indexed)
        if len(self.seen) < _MAX_OPERATIONS:
            self.seen.append(seen)
        try:
            if func is torch.Tensor.backward:
                return self._go_back(*args, **kwargs)
            if invented and is_big_product(func, tensors):
                result = pretend(func, args, kwargs, tensors, self._inventor.noise)
            else:
                result = _with_own_memory(func, args, kwargs)
        except Exception as error:
            self._failures = [*self._failures[-7:], (error, seen)]
            raise
        if invented:
            self.mark(tree_flatten(result)[0])
        return result

    def _go_back(self, root: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        with self:  # for hooks and custom Functions, which run in there
            torch.autograd.backward(root, gradient, *args, **kwargs)

    def mark(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._invented[value] = True


def _with_own_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; one that writes to a stand-in whose rows are one in memory is given a copy of that."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "single memory location" not in str(error):
            raise
    args, kwargs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if 0 in tensor.stride() else tensor, (args, kwargs)
    )
    return func(*args, **kwargs)


def _asks_for_device(args: Any, kwargs: Any) -> bool:
    """Whether `x.to(...)` names a device other than the CPU: by its name, by number, or by a tensor that is there."""
    for value in [*args[1:], kwargs.get("device"), kwargs.get("other")]:
        named = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(named, torch.device) and named.type != "cpu":
            return True
        if isinstance(named, int) and not isinstance(named, bool):
            return True
        if isinstance(named, str) and _DEVICE.fullmatch(named):
            return True
    return False
