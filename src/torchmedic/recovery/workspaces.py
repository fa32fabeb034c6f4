"""Room for the workspaces of convolutions on a device.

cuDNN looks for memory beside the result of a convolution: for copies of input and result in another layout. Where it
gets none, it takes another kernel, with other last bits, and tells nobody. So the room is made before the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchmedic.recovery.room import UNUSABLE_SHARE, in_use_and_limit

CONVOLUTIONS = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    }
)
_TRANSPOSED = frozenset({torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d})
_WATCHED_UPDATES = 5  # after the last out-of-memory: later steps find the same room


class Workspaces:
    """Watches the convolutions of the first steps, and of those after an out-of-memory."""

    def __init__(self) -> None:
        self.are_used = False  # a convolution was made on a device
        self._left = _WATCHED_UPDATES

    def watch(self) -> None:
        """Memory has run out: the steps that follow are others than those before."""
        self._left = _WATCHED_UPDATES

    def update_ended(self) -> None:
        self._left -= 1

    def missing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The bytes that are missing for the result of a convolution and its workspace."""
        if self._left <= 0 or len(args) < 2 or not isinstance(args[0], torch.Tensor) or not args[0].is_cuda:
            return 0
        self.are_used = True
        memory = in_use_and_limit(args[0].device)
        if memory is None:
            return 0
        source, weight = args[0], args[1]
        strides = args[3] if len(args) > 3 else kwargs.get("stride", 1)
        factor = math.prod(strides) if isinstance(strides, tuple | list) else strides ** (weight.dim() - 2)
        inputs, outputs = weight.shape[1] * (args[6] if len(args) > 6 else kwargs.get("groups", 1)), weight.shape[0]
        result = source.nbytes * outputs // max(inputs * factor, 1)
        if func in _TRANSPOSED:
            result = source.nbytes * weight.shape[1] * factor // max(weight.shape[0], 1)
        wanted = source.nbytes + 2 * (result + weight.nbytes) + int(UNUSABLE_SHARE * memory[1])
        return max(int(wanted) - (memory[1] - memory[0]), 0)
