"""Workspaces of convolutions on a device, none of which is refused silently in a forward pass.

cuDNN looks for memory beside the result of a convolution: for copies of input and result in another layout. Where it
gets none, torch takes another kernel, with other last bits, tells nobody, and keeps that kernel for all later calls of
the same shape. But the allocator calls back when it refuses memory, and an exception that is raised there ends the
convolution. So a convolution fails here before another kernel is taken, and can be repeated with more room.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchmedic.observe.memory import cuda_refusals

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


class Workspaces:
    """Makes an exception of a refused workspace, and counts those that it cannot: in backward passes."""

    def __init__(self) -> None:
        self._thread: int | None = None  # whose refusals are exceptions
        self._silent: list[int] = []  # bytes that were refused
        self._is_counted = False  # the last refusal
        cuda_refusals.listen(self)

    def refused(self, asked: int) -> None:
        """The allocator has no memory.

        Raises:
            OutOfMemoryError: The convolution that asked must not go on.
        """
        if self._thread == threading.get_ident():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked / 2**20:.2f} MiB.")
        node: Any = torch._C._current_autograd_node()
        self._is_counted = node is not None and node.name().startswith("ConvolutionBackward")
        if self._is_counted:
            self._silent.append(asked)

    def convolution(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a convolution with its workspace.

        Raises:
            OutOfMemoryError: There is no memory for the workspace, or for the result.
        """
        self._thread = threading.get_ident()
        try:
            return function(*args, **kwargs)
        finally:
            self._thread = None

    def was_raised(self) -> None:
        """The last refusal has become an exception, as it does where no kernel is left to take."""
        if self._is_counted:
            self._silent.pop()
            self._is_counted = False

    def refused_silently(self) -> int:
        """The bytes of the largest workspace that was refused since the last question: another kernel was taken."""
        found = max(self._silent, default=0)
        self._silent.clear()
        self._is_counted = False
        return found
