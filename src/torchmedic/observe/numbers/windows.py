"""Updates in a row that can be run again: a copy of the weights, and the backward calls and updates that followed it.

A copy holds the weights, the small buffers and the optimizer state.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterable, Iterator
from statistics import median
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.device.async_devices import devices
from torchmedic.observe.memory.host import free_bytes
from torchmedic.observe.numbers.kept_steps import KeptBackward, UpdateEnd
from torchmedic.observe.step.tensors import parameters_of, tensors_in

_MAX_COPY_BYTES = 256 << 20
_MAX_SHARE_OF_FREE_MEMORY = 0.1


class OptimizerState(NamedTuple):
    """The state of one optimizer: by the index of the parameter among all of its parameters."""

    optimizer: weakref.ref[Any]
    state: dict[int, dict[str, Any]]


class Copy(NamedTuple):
    """The weights, buffers and optimizers as they were before an update."""

    update: int  # how many updates came before
    tensors: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]]
    optimizers: list[OptimizerState]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that still exist, each with its value of then."""
        return [
            (tensor, value)
            for reference, value in self.tensors
            if (tensor := reference()) is not None and tensor.shape == value.shape and tensor.dtype == value.dtype
        ]

    def distance(self) -> float:
        """How far the trained tensors are from the copy, in multiples of their size: the median over the tensors."""
        found = [
            float((tensor.detach() - value).norm() / size)
            for tensor, value in self.pairs()
            if tensor.requires_grad and tensor.is_floating_point() and (size := value.norm()) > 0
        ]
        return median(found) if found else 0.0


class NoRoom(Exception):
    """A copy takes too much memory."""


def take_copy(optimizers: list[Any], tensors: list[torch.Tensor], update: int) -> Copy:
    """Copy some tensors and the state of some optimizers.

    Raises:
        NoRoom: With the size.
    """
    states = [(optimizer, _state(optimizer)) for optimizer in optimizers]
    inner = [value for _, state in states for held in state.values() for value in tensors_in(list(held.values()))]
    total = [*tensors, *inner]
    if not _is_room_for(total):
        size = sum(tensor.nbytes for tensor in total) >> 20
        raise NoRoom(f"there was no room for a copy of the weights and the optimizer state ({size} MiB)")
    with torch.no_grad():
        copied = [(weakref.ref(tensor), tensor.detach().clone()) for tensor in tensors]
        held = [
            OptimizerState(weakref.ref(optimizer), {key: cloned(values) for key, values in state.items()})
            for optimizer, state in states
        ]
    return Copy(update, copied, held)


def cloned(values: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter, with tensors and lists of its own."""
    return {name: _cloned(value) for name, value in values.items()}


def _cloned(value: Any) -> Any:
    if isinstance(value, list):  # the directions that LBFGS remembers
        return [_cloned(part) for part in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _state(optimizer: Any) -> dict[int, dict[str, Any]]:
    return {
        index: values
        for index, tensor in enumerate(parameters_of(optimizer))
        if isinstance(values := optimizer.state.get(tensor), dict) and values
    }


def _is_limited() -> bool:
    """Whether the process may have only so many addresses: a copy of ours would take them from the script."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _is_room_for(tensors: list[torch.Tensor]) -> bool:
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    for device, nbytes in needed.items():
        late = devices.get(device.type)
        if late is None and (device.type != "cpu" or _is_limited()):
            return False
        free = late.free_bytes(device) if late is not None else free_bytes()
        if nbytes > min(_MAX_COPY_BYTES, _MAX_SHARE_OF_FREE_MEMORY * free):
            return False
    return True


class Window(NamedTuple):
    """A copy, and the backward calls that followed it without a gap."""

    copy: Copy
    calls: list[KeptBackward]
    reaches_present: bool  # the last of them is the last that there was
    is_departure: bool = False  # in these updates the loss left its level


def windows_of(
    copies: Iterable[Copy | None], calls: Iterable[KeptBackward], first_calls: list[KeptBackward]
) -> Iterator[Window]:
    """The updates that can be run again from each copy.

    Args:
        copies: The first is from the beginning of training.
        calls: The last calls, oldest first.
        first_calls: The calls at the beginning of training.
    """
    known = [call for call in calls if not call.is_sampled_out]
    recent = [call for call in known if not call.is_repeated or call is known[-1]]
    for position, copy in enumerate(copies):
        if copy is None or not copy.tensors:
            continue
        early = first_calls if position == 0 else []
        later = {id(call): call for call in [*early, *recent] if call.update >= copy.update}
        found = _without_gap(list(later.values()), copy.update)
        if found:
            last = recent[-1] if recent else found[-1]
            yield Window(_renewed(copy, found[0], last), found, found[-1] is last)


def beside(pinned: list[Window], present: list[Window]) -> list[Window]:
    """Windows that are pinned, and those of the present that do not hold the same updates."""
    known = {(window.copy.update, id(window.calls[-1])) for window in pinned}
    return [*pinned, *(window for window in present if (window.copy.update, id(window.calls[-1])) not in known)]


def _renewed(copy: Copy, first: KeptBackward, last: KeptBackward) -> Copy:
    """A copy for the tensors that the loop trains now, where it binds new ones in every step."""
    old, new = first.leaves, last.leaves
    if not old or len(old) != len(new) or any(leaf.tensor() is not None for leaf in old):
        return copy
    pairs = [(one.tensor, other.alias) for one, other in zip(new, old, strict=True)]
    return copy._replace(tensors=[(reference, value) for reference, value in pairs if value is not None])


def _without_gap(calls: list[KeptBackward], first: int) -> list[KeptBackward]:
    """The calls from an update on, as far as none is missing."""
    found: list[KeptBackward] = []
    expected = first
    for call in calls:
        if call.update > expected or (not found and call.update != first):
            break
        expected = call.update + max(1, len(call.ends))  # several optimizers may step after one call
        found.append(call)
    return found


_MAX_FRAMES = 60


def note_end(call: KeptBackward, optimizer: Any, frame: FrameType) -> None:
    """Note the frame that calls the update, of those that the backward call was made from."""
    if any(end.code is None or end.optimizer() is optimizer for end in call.ends):
        return
    at: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if at is None:
            return
        code = at.f_code
        for point in call.points:
            if point.code is code:
                call.ends += (update_end(optimizer, code, at.f_lasti),)
                return
        at = at.f_back


def update_end(optimizer: Any, code: CodeType | None = None, lasti: int = -1) -> UpdateEnd:
    """An update with the settings that an optimizer has now."""
    rates = tuple([group.get("lr") for group in optimizer.param_groups])
    names = ("momentum", "betas")
    momenta = tuple([{name: group[name] for name in names if name in group} for group in optimizer.param_groups])
    return UpdateEnd(weakref.ref(optimizer), rates, code, lasti, momenta)
