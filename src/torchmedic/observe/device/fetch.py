"""Numbers that are still on their device, brought to the host all at once."""

from __future__ import annotations

import torch

from torchmedic.observe.device import async_devices

_ARRIVED = 1.0  # the last number of a copy; memory of the host holds 0 there until the copy is complete


class Fetch:
    """The values of tensors of one element each.

    Args:
        tensors: The tensors, on any devices.
        may_wait: Whether to wait for the devices now. Otherwise `has_arrived` says when the values are there.
    """

    def __init__(self, tensors: list[torch.Tensor], *, may_wait: bool) -> None:
        self._count = len(tensors)
        self._parts: list[tuple[list[int], torch.Tensor]] = []
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for place, indices in by_device.items():
            values = torch.stack([tensors[index].detach().double().reshape(()) for index in indices])
            device = None if may_wait else async_devices.devices.get(place.type)
            if device is None:
                self._parts.append((indices, torch.cat([values.cpu(), torch.tensor([_ARRIVED], dtype=values.dtype)])))
                continue
            host, event = device.places(len(indices) + 1, values.dtype)
            host.zero_()
            device.arrange_many(host, event, torch.cat([values, torch.full_like(values[:1], _ARRIVED)]))
            self._parts.append((indices, host))

    @property
    def has_arrived(self) -> bool:
        return all(float(host[-1]) == _ARRIVED for _, host in self._parts)

    def values(self) -> list[float]:
        """The values in the order of the tensors; only after they have arrived."""
        found = [0.0] * self._count
        for indices, host in self._parts:
            for index, value in zip(indices, host[:-1].tolist(), strict=True):
                found[index] = value
        return found
