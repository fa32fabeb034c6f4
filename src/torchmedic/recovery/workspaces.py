"""Workspaces of convolutions on a device, none of which is refused silently in a forward pass.

cuDNN looks for memory beside the result of a convolution: for copies of input and result in another layout. Where it
gets none, torch takes another kernel, with other last bits, tells nobody, and keeps that kernel for all later calls of
the same shape. But the allocator calls back when it refuses memory, and an exception that is raised there ends the
convolution. So a convolution fails here before another kernel is taken, and can be repeated with more room.

A node of a backward pass cannot be repeated. As long as it is not known whether a step has room for its workspaces, the
gradients of a convolution are computed once before its node does it, and thrown away.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchmedic.contained import contained
from torchmedic.observe.memory import cuda_refusals
from torchmedic.recovery.living_tensors import plainly
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.source.objects.graph import name_of

_NODE = "ConvolutionBackward0"
_SETTINGS = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
_DEVICES = frozenset({"cuda"})  # whose convolutions take another kernel without a word
_MAX_TRIES = 4

CONVOLUTIONS = frozenset(
    {torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
)


class Workspaces:
    """Makes an exception of a refused workspace, and counts those that it cannot: in backward passes."""

    def __init__(self) -> None:
        self._thread: int | None = None  # whose refusals are exceptions
        self._takes_any_kernel = False  # the exception
        self._silent: list[int] = []  # bytes that were refused
        self._is_counted = False  # the last refusal
        self._asked = 0  # bytes, by a convolution that was ended
        cuda_refusals.listen(self)

    def refused(self, asked: int) -> None:
        """The allocator has no memory.

        Raises:
            OutOfMemoryError: The convolution that asked must not go on.
        """
        if self._thread == threading.get_ident() and not self._takes_any_kernel:
            self._asked = asked
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked / 2**20:.2f} MiB.")
        node: Any = torch._C._current_autograd_node()
        self._is_counted = self._thread is not None or (node is not None and name_of(node) == _NODE)
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

    @contextlib.contextmanager
    def with_any_kernel(self) -> Iterator[None]:
        """Convolutions inside the block go on without their workspaces, and are counted."""
        self._takes_any_kernel = True
        try:
            yield
        finally:
            self._takes_any_kernel = False

    def try_before_use(self, nodes: Iterable[Any], saved: SavedTensors, make_room: Callable[[int], bool]) -> None:
        """Have the convolutions of a backward pass tried before their gradients are computed.

        Args:
            nodes: Of the graph.
            saved: Puts handles in the place of saved tensors.
            make_room: For so many bytes; says whether there is more now.
        """
        for node in nodes:
            if name_of(node) == _NODE and node._input_metadata[0].device.type in _DEVICES:
                handle = saved.source(node, "_raw_saved_input")
                if handle is not None:
                    handle.before_use = functools.partial(self._tried, make_room)

    @contained("recover.workspace")
    def _tried(self, make_room: Callable[[int], bool], data: torch.Tensor) -> None:
        """Compute the gradients of the convolution whose node runs, until there is room for them."""
        node: Any = torch._C._current_autograd_node()
        if node is None or name_of(node) != _NODE:
            return
        gradient = node._input_metadata[0]
        settings = [getattr(node, f"_saved_{name}") for name in _SETTINGS]
        needed = [edge is not None for edge, _ in node.next_functions]
        for _ in range(_MAX_TRIES):
            self._asked = 0
            try:
                with plainly():
                    made = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
                    weight = node._saved_weight
                    self.convolution(torch.ops.aten.convolution_backward.default, made, data, weight, *settings, needed)
                return
            except torch.OutOfMemoryError:
                made = None
                if not make_room(max(self._asked, data.nbytes)):
                    return

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
