"""Losses of a device that is read late: copied when they are made, read when they have arrived.

In steps of which little is noted they are not even copied one by one, but kept on the device and read together.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.kept_steps import KeptBackward, KeptBackwards

_MAX_HELD = 64  # losses that are kept on a device before they are read
_MAX_COMING = 16  # losses that are being copied at a time


class Coming(NamedTuple):
    """A loss that is being copied."""

    key: Any
    host: torch.Tensor
    event: Any
    call: KeptBackward


class Read(NamedTuple):
    """A loss that has arrived, and the call of backward that it was given to."""

    key: Any
    loss: float
    call: KeptBackward


class LateLosses:
    """Copies losses from a late device, and reads them when they have arrived."""

    def __init__(self, kept_backwards: KeptBackwards) -> None:
        self._pasts = kept_backwards
        self._coming: list[Coming] = []
        self.are_usual = False  # losses of this run are read late
        self.place: tuple[int, torch.dtype] | None = None  # the index of their device, and their type
        self._places: dict[tuple[int, torch.dtype], tuple[torch.Tensor, Any]] = {}
        self._place = 0
        self.held: list[tuple[torch.Tensor, KeptBackward]] = []  # still on the device
        self._many: tuple[torch.Tensor, Any] | None = None  # where those are copied to
        self._together: list[KeptBackward] = []  # the calls whose losses are being copied there

    @property
    def are_coming(self) -> bool:
        return bool(self._coming)

    def copy(self, root: torch.Tensor, kind: str, key: Any, frame: FrameType, update: int) -> KeptBackward | None:
        """Have a loss copied; None where the device may not be used now."""
        self.are_usual = True
        self.place = (root.get_device(), root.dtype)
        device = async_devices.devices[kind]
        if not device.may_work():
            return None
        if self.held:
            self._copy_held()
        # Pinned memory that is handed back and forth costs a hundred microseconds a step: some places are kept.
        self._place = (self._place + 1) % _MAX_COMING
        where = (self._place, root.dtype)
        place = self._places.get(where)
        if place is None:
            place = self._places[where] = device.place(root.dtype)
        host, event = place
        device.arrange(host, event, root.detach())
        if len(self._coming) >= _MAX_COMING:
            del self._coming[0]  # nobody has stepped for long; its place is needed
        call = self._pasts.record(frame, update)
        self._coming.append(Coming(key, host, event, call))
        return call

    def hold(self, root: torch.Tensor, step: int, update: int) -> None:
        """Keep a loss on its device, for now."""
        held = self.held
        held.append((root.detach(), self._pasts.record_sampled_out(step, update)))
        if len(held) >= _MAX_HELD:
            self._copy_held()

    def _copy_held(self) -> None:
        held, self.held = self.held, []
        first = held[0][0]
        device = async_devices.devices.get(first.device.type)
        index, dtype = first.get_device(), first.dtype
        held = [each for each in held if each[0].get_device() == index and each[0].dtype is dtype]
        if device is None or not device.may_work():
            return
        if self._many is None or self._many[0].dtype is not dtype:
            self._many = device.places(_MAX_HELD, dtype)
        losses = [loss for loss, _ in held]
        try:
            values = torch.stack(losses)
        except RuntimeError:  # some have no dimension, and some have one
            values = torch.stack([loss.reshape(()) for loss in losses])
        device.arrange_many(*self._many, values.reshape(-1))
        self._together = [call for _, call in held]

    def forget(self) -> None:
        """Drop the losses that are being copied."""
        self._coming.clear()

    def arrived(self) -> list[Read]:
        """All losses that are being copied one by one, in order. The copies began before backward: waiting is short."""
        coming, self._coming = self._coming, []
        if not coming:
            return []
        if not coming[-1].event.query():
            coming[-1].event.synchronize()
        return [_read(each) for each in coming]

    def first_arrived(self) -> Read | None:
        """The oldest loss that is being copied, if it has arrived."""
        if not self._coming or not self._coming[0].event.query():
            return None
        return _read(self._coming.pop(0))

    def arrived_together(self) -> tuple[list[float], list[KeptBackward]]:
        """The losses that were held, each with its call. Asked when a later copy has finished, so theirs has too."""
        calls, self._together = self._together, []
        if not calls or self._many is None:
            return [], []
        return self._many[0][: len(calls)].tolist(), calls

    def belongings(self) -> Any:
        """What must not be freed once the device is dead."""
        return self._places, self._coming, self._many, self.held


def _read(coming: Coming) -> Read:
    return Read(coming.key, float(coming.host.item()), coming.call)
