"""Finite checks of gradients and weights: which there are, where they are, and how much time checks may take."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from math import inf, isfinite, sqrt
from time import thread_time
from typing import Any, NamedTuple

import torch

from torchmedic.observe.budget import Account
from torchmedic.observe.device import async_devices
from torchmedic.source.objects.finite import has_values, is_finite, own_part
from torchmedic.source.objects.graph import leaves_behind

_REST = 32  # looks, of which one goes beyond the first tensor when the time is used up
_MAX_NODES = 2000  # of a graph that is walked to its leaves
_MAX_CHEAP_ELEMENTS = 1 << 14  # cost about as much to look at as one
_MAX_PLAIN_ELEMENTS = 1024  # that are read faster one by one than by an operation
_WIDE = frozenset({torch.float32, torch.float64, torch.bfloat16})  # whose first byte is all of exponent but a bit
WITH_NORM = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_STRIDED = torch.strided
_Tensor = torch.Tensor


# To ask for the stack of `torch.func` itself would be enough to have one made for this thread, and autograd would copy
# it for every node of every backward from then on.
in_functorch = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


def are_plain() -> bool:
    """Whether tensors have values now: the code is neither inside of `torch.func` nor of a dispatch mode."""
    return not in_functorch() and not _modes()


def witness_of(optimizers: Sequence[Any]) -> tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None:
    """A gradient that a bad loss went into: while it exists, the gradients were not dropped unseen."""
    for optimizer in optimizers:
        for tensor in with_gradient(optimizer):
            if tensor.grad is not None:
                return weakref.ref(tensor), weakref.ref(tensor.grad)
    return None


def is_there(witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None) -> bool:
    if witness is None:
        return False
    tensor, gradient = witness[0](), witness[1]()
    return tensor is not None and gradient is not None and tensor.grad is gradient


def kind_of_device(optimizer: Any) -> str:
    """The device type of an optimizer's weights, taken from the first of them."""
    for group in optimizer.param_groups:
        if group["params"]:
            tensor = group["params"][0]
            return "cpu" if tensor.is_cpu else str(tensor.device.type)
    return ""


def may_be_read(optimizer: Any) -> bool:
    """Whether the values of an optimizer's weights can be read without waiting."""
    kind = kind_of_device(optimizer)
    return kind == "cpu" and kind not in async_devices.devices


def all_bad(tensors: list[torch.Tensor], *, at_once: bool) -> set[int]:
    """The identities of the tensors that are not finite.

    Args:
        tensors: With gradients, about to be updated for the first time.
        at_once: Whether to wait for the device once and not for each of them.
    """
    if at_once and tensors:
        where = tensors[0].device
        parts = [own_part(tensor).detach() for tensor in tensors]
        sums = torch.stack([part.abs().sum().to(where, torch.float64) for part in parts]).tolist()
        tensors = [tensor for tensor, total in zip(tensors, sums, strict=True) if not isfinite(total)]
    return {id(tensor) for tensor in tensors if not is_finite(tensor)}


class Plain(NamedTuple):
    """How to read a short vector without an operation of torch, which takes several times as long.

    A number whose first byte is 127 or 255, apart from its sign, is infinite, NaN or close to the largest number.
    """

    nbytes: int
    address: ctypes.c_void_p  # is set to that of a tensor, and `bytes_at` reads from there
    bytes_at: Any  # a pointer of ctypes
    first_bytes: slice

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Plain | None:
        width, nbytes = tensor.element_size(), tensor.nbytes
        if tensor.dtype not in _WIDE or not 0 < tensor.numel() <= _MAX_PLAIN_ELEMENTS or sys.byteorder != "little":
            return None
        pointer = ctypes.POINTER(ctypes.c_char)()
        return cls(nbytes, ctypes.c_void_p.from_buffer(pointer), pointer, slice(width - 1, nbytes, width))


class Witness(NamedTuple):
    """The gradient that is looked at in every step: an index into the parameters of the first group."""

    place: int
    is_vector: bool  # of few elements: their sum is the cheapest operation that reads them all
    plain: Plain | None = None  # where not even an operation is needed


def cheapest_witness(optimizer: Any) -> Witness:
    """Choose the gradient to look at in every step, on the CPU.

    Backward reaches the first parameters last, so what is bad anywhere tends to arrive there: in the weight of the
    first layer that is trained, and in its bias, which has fewer elements.
    """
    parameters = optimizer.param_groups[0]["params"]
    first = next((place for place, tensor in enumerate(parameters) if tensor.grad is not None), 0)
    for place in (first, first + 1):
        if place < len(parameters) and _is_looked_at(tensor := parameters[place]):
            is_vector = tensor.dim() == 1 and tensor.numel() <= _MAX_CHEAP_ELEMENTS and tensor.dtype in WITH_NORM
            if is_vector:
                return Witness(place, True, Plain.of(tensor))
    return Witness(first, False)


def is_fine(optimizer: Any, witness: Witness, *, computes: bool = True) -> bool:
    """Whether the rates and a gradient are finite; False also where that has to be found out in another way.

    Called in nearly every step, so it does by itself what others have functions for. Without `computes`, it runs no
    operation of torch.
    """
    groups = optimizer.param_groups
    for group in groups:
        rate = group.get("lr")
        if type(rate) is float and not -inf < rate < inf:
            return False
    place, is_vector, plain = witness
    parameters = groups[0]["params"]
    if place >= len(parameters) or "cpu" in async_devices.devices:
        return False
    parameter = parameters[place]
    gradient = parameter.grad
    if gradient is None:
        return bool(parameter.is_cpu)
    if type(gradient) is not _Tensor or not gradient.is_cpu:
        return False
    try:
        if plain is not None:
            nbytes, address, bytes_at, first_bytes = plain
            if gradient.nbytes == nbytes and gradient.is_contiguous():
                address.value = gradient.data_ptr()  # 0 where the memory has been given back
                first = bytes_at[first_bytes] if address else b"\x7f"
                if not (127 in first or 255 in first):
                    return True
        if not computes or gradient.requires_grad:
            return False
        if not is_vector:
            return gradient.layout is _STRIDED and (gradient.numel() > _MAX_CHEAP_ELEMENTS or is_finite(gradient))
        return bool(-inf < gradient.sum().item() < inf)
    except (RuntimeError, TypeError):  # the parameter is another one now, or its gradient is sparse
        return False


def is_bad_witness(optimizer: Any, witness: Witness) -> bool:
    """Whether the gradient that `is_fine` looks at, or the one before it, is bad."""
    parameters = optimizer.param_groups[0]["params"][max(0, witness.place - 1) : witness.place + 1]
    gradients = [
        tensor.grad for tensor in parameters if _is_looked_at(tensor) and tensor.numel() <= _MAX_CHEAP_ELEMENTS
    ]
    return not all(is_finite(gradient) for gradient in gradients if gradient is not None)


def _is_looked_at(tensor: torch.Tensor) -> bool:
    gradient = tensor.grad
    return gradient is not None and gradient.layout is _STRIDED and tensor.numel() > 0 and has_values(tensor)


def with_gradient(optimizer: Any) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"] if _is_looked_at(tensor)]


def gradients(optimizer: Any) -> list[torch.Tensor]:
    return [tensor.grad for tensor in with_gradient(optimizer) if tensor.grad is not None]


def leaf_gradients(roots: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients of the leaves behind some roots on the CPU."""
    living = [root for reference in roots if (root := reference()) is not None and root.is_cpu]
    gradients = [leaf.grad for leaf in leaves_behind(living, _MAX_NODES)]
    return [each for each in gradients if each is not None and each.layout is torch.strided]


def finite_rates(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, float) and not isfinite(rate):
            return False
    return True


def norm_of(tensors: Sequence[torch.Tensor]) -> float | None:
    """The norm of all elements of some tensors on the CPU; None unless it is finite, or if it cannot be computed.

    If a norm is finite, every element is. It costs about as much as a look at the tensors one by one.
    """
    if not all(type(tensor) is torch.Tensor and tensor.dtype in WITH_NORM for tensor in tensors):
        return None
    try:
        norms = torch._foreach_norm([tensor.detach() if tensor.requires_grad else tensor for tensor in tensors])
        norm = sqrt(sum(part * part for part in (float(each.item()) for each in norms)))
    except (RuntimeError, OverflowError):
        return None
    return norm if isfinite(norm) else None


class FiniteChecks:
    """Checks tensors, all of them or some, as an account allows."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._turn = 0
        self._next_turn = _REST
        self.was_left = True  # time, when it was last asked whether a look is due
        self.norm: float | None = None  # of all tensors of the last check, where all were looked at

    @property
    def is_left(self) -> bool:
        return self._account.left > 0

    def is_due(self) -> bool:
        """Whether there is time for more than a look at one tensor. Once there is none, that is asked now and then."""
        self._turn += 1
        is_turn = self._turn >= self._next_turn
        if is_turn:
            self._next_turn = self._turn + _REST
        if is_turn or self.was_left:
            self.was_left = self.is_left
        return self.was_left or is_turn

    def passed(self, count: int) -> None:
        """Some updates went by without a question."""
        self._turn += count

    def any_bad_gradient(self, optimizer: Any) -> bool:
        """Whether gradients of an optimizer are not finite; two are looked at once the budget is used up."""
        started, is_left = thread_time(), self.is_left
        tensors = [tensor.grad for tensor in self._parameters(optimizer, is_left) if tensor.grad is not None]
        return self._any_bad(tensors, is_left, started)

    def any_bad_weight(self, optimizer: Any, known: set[int]) -> bool:
        """Whether weights of an optimizer, other than the known ones, are not finite."""
        started, is_left = thread_time(), self.is_left
        tensors = [tensor for tensor in self._parameters(optimizer, is_left) if id(tensor) not in known]
        return self._any_bad(tensors, is_left, started)

    def any_bad(self, tensors: list[torch.Tensor]) -> bool:
        """Whether some tensors are not finite; only two of them are checked once the budget is used up."""
        is_left = self.is_left
        return self._any_bad(tensors if is_left else self._some(tensors), is_left, thread_time())

    def _parameters(self, optimizer: Any, is_left: bool) -> list[torch.Tensor]:
        """The parameters with a gradient, or some of them. To ask all of them takes longer than to look at two."""
        if is_left:
            return with_gradient(optimizer)
        groups = optimizer.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else [each for group in groups for each in group["params"]]
        return [tensor for tensor in self._some(parameters) if _is_looked_at(tensor)]

    def _some(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The first tensor, and another one in every turn."""
        return [tensors[0], tensors[self._turn // _REST % len(tensors)]] if len(tensors) > 2 else tensors

    def _any_bad(self, tensors: list[torch.Tensor], are_all: bool, started: float) -> bool:
        self.norm = norm_of(tensors) if are_all and tensors else None
        bad = self.norm is None and not all(is_finite(tensor) for tensor in tensors)
        self._account.spend(thread_time() - started)
        return bad
