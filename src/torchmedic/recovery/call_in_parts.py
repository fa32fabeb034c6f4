"""A call of a module in parts of its rows: no part keeps its activations, and backward computes each part again.

The caller gets the result of all rows, so its loss and all that follows are as before. Backward takes the parts one
after the other and adds up what they give to the parameters.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.autograd.graph
from torch._C import _ImperativeEngine

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.recovery.handles import gone
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.random_calls import generator_states
from torchmedic.recovery.room import give_back_caches
from torchmedic.recovery.rows import Joined, RowCall, tensors_of
from torchmedic.source.objects.graph import leaves_behind

Cast = tuple[str, bool, torch.dtype]

_engine = _ImperativeEngine()  # the one of autograd, past all that watches it


class CallInParts:
    """One call, from its forward to its backward."""

    def __init__(
        self,
        call: RowCall,
        module: torch.nn.Module,
        leaves: Sequence[torch.Tensor],
        around_part: Callable[[], contextlib.AbstractContextManager[Any]],
        *,
        draws: bool,
    ) -> None:
        """Prepare a call.

        Args:
            call: The call.
            module: Whose call it is.
            leaves: The tensors beside the arguments that the call gives gradients to.
            around_part: Entered around the computation of each part.
            draws: Whether the call draws random numbers, which backward must draw again.
        """
        self._call = call
        self._leaves = list(leaves)
        self._around_part = around_part
        self._draws = draws
        self._modes = [(each, each.training) for each in module.modules()]
        self._buffers = [(each, each._version) for each in module.buffers()]
        self._casts = casts((*call.tensors, *self._leaves))
        self._parts: list[tuple[slice, Callable[[], None] | None]] = []
        self.has_more_room: Callable[[int], bool] = lambda _: False  # asked in backward where memory is short
        self.learned: Callable[[int], None] = lambda _: None  # told how many rows a part of the backward may have
        self.backward_rows = call.count  # the most that a part of the backward may have

    def result(self, rows: int) -> Any:
        """The result of the whole call, in parts of so many rows.

        Raises:
            CannotSplit: The results of the parts are not like each other.
        """
        call, joined = self._call, Joined(self._call.count)
        keeps_graph = torch.is_grad_enabled()
        for start in range(0, call.count, rows):
            part = slice(start, min(start + rows, call.count))
            self._parts.append((part, generator_states() if self._draws else None))
            inputs = call.part(call.tensors, part, [each.requires_grad for each in call.tensors])
            with self._around_part():
                with self._dropping() if keeps_graph else contextlib.nullcontext():
                    result = call.result(inputs)
                with torch.no_grad():
                    joined.add(result, part)
            del inputs, result
        found, given = joined.tensors, call.tensors
        if keeps_graph and any(joined.needs_gradient):
            self.backward_rows = min(self.backward_rows, rows)
            found = _apply(self, joined, *given, *self._leaves)
            call.release()
        return joined.result(found, given)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        """A graph is made, as the code may ask for it, but keeps no tensor."""
        with self._as_before(), torch.autograd.graph.saved_tensors_hooks(_nothing, gone):
            yield

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Modes of modules and of torch are those of the call."""
        now = [(each, each.training) for each, _ in self._modes]
        _set_modes(self._modes)
        try:
            with casting(self._casts):
                yield
        finally:
            _set_modes(now)

    def gradients(
        self, tensors: Sequence[torch.Tensor], needed: Sequence[bool], outer: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs and the leaves.

        Raises:
            RuntimeError: A buffer was changed in place since the forward, or memory ran out.
        """
        if any(buffer._version != version for buffer, version in self._buffers):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "buffer of a module that was called in parts"
            )
        sums: list[torch.Tensor | None] = [None] * len(tensors)
        pending = deque(self._parts)
        while pending:
            rows, rewind = pending.popleft()
            size = rows.stop - rows.start
            if size > self.backward_rows and rewind is None:
                middle = rows.start + (size + 1) // 2
                pending.extendleft([(slice(middle, rows.stop), None), (slice(rows.start, middle), None)])
                continue
            try:
                found = self._part(tensors[: len(self._call.has_rows)], needed, outer, rows, rewind)
                sums = self._sums(sums, found, tensors)  # from here on nothing asks for memory
                self._add(sums, found, rows)
                del found
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                nbytes = sum(each.nbytes for each in outer if each is not None) * size // self._call.count
                if not self.has_more_room(nbytes):
                    if size == 1 or rewind is not None:
                        raise
                    self.backward_rows = (size + 1) // 2
                    self.learned(self.backward_rows)
                give_back_caches()
                pending.appendleft((rows, rewind))
        return sums

    def _has_rows(self, index: int) -> bool:
        return index < len(self._call.has_rows) and self._call.has_rows[index]

    def _sums(
        self, sums: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The sums so far, with zeros for what no part before has given a gradient to."""
        with torch.no_grad(), unseen():
            return [
                torch.zeros_like(tensors[index] if self._has_rows(index) else each)
                if total is None and each is not None
                else total
                for index, (total, each) in enumerate(zip(sums, found, strict=True))
            ]

    def _add(self, sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None], rows: slice) -> None:
        with torch.no_grad(), unseen():
            for index, (total, gradient) in enumerate(zip(sums, found, strict=True)):
                if total is not None and gradient is not None:
                    (total[rows] if self._has_rows(index) else total).add_(gradient)

    def _part(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        outer: Sequence[torch.Tensor | None],
        rows: slice,
        rewind: Callable[[], None] | None,
    ) -> list[torch.Tensor | None]:
        """The gradients that some rows give."""
        inputs = self._call.part(tensors, rows, needed[: len(tensors)])
        with self._around_part(), torch.enable_grad(), self._as_before(), contextlib.ExitStack() as stack:
            if rewind is not None:
                stack.callback(generator_states())
                rewind()
            part = tensors_of(self._call.result(inputs))
        pairs = [
            (tensor, gradient[rows])
            for tensor, gradient in zip(part, outer, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        known = {id(each) for each in (*inputs, *self._leaves)}
        if any(id(each) not in known for each in leaves_behind(part)):
            raise RuntimeError(
                "torchmedic: a module that was called in parts uses a parameter that it did not use before"
            )
        wanted = [each for each, is_needed in zip([*inputs, *self._leaves], needed, strict=True) if is_needed]
        roots = tuple(tensor for tensor, _ in pairs)
        found = iter(gradients_of(roots, tuple(gradient for _, gradient in pairs), wanted) if pairs else ())
        return [next(found, None) if is_needed else None for is_needed in needed]


def gradients_of(
    roots: Sequence[torch.Tensor], outer: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """What `torch.autograd.grad` gives, unseen by those who watch it; None where a root does not depend on an input."""
    return cast(
        "Sequence[torch.Tensor | None]",
        _engine.run_backward(
            tuple(roots), tuple(outer), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        ),
    )


def casts(tensors: Iterable[torch.Tensor]) -> list[Cast]:
    """What autocast does now, for each type of device."""
    devices = {each.device.type for each in tensors}
    return [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]


@contextlib.contextmanager
def casting(given: Iterable[Cast]) -> Iterator[None]:
    """Autocast does the same as then. Casts of weights are not kept, with their graph, for calls outside."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in given:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def _nothing(tensor: torch.Tensor) -> None:
    return None


def _set_modes(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CallInParts, joined: Joined, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(each for each, needed in zip(joined.tensors, joined.needs_gradient, strict=True) if not needed)
        )
        return tuple(joined.tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: torch.Tensor | None) -> Any:
        return None, None, *ctx.call.gradients(ctx.saved_tensors, ctx.needs_input_grad[2:], outer)


_apply: Callable[..., Any] = _InParts.apply
