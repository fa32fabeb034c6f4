"""The guard: sees every call of torch that a thread makes, and repeats the one that runs out of memory.

Only the call itself is repeated, never a statement of the user's: so no side effect happens twice. A call that draws
random numbers gets the same numbers again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchmedic.contained import report_fault
from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.observe.hooks.patches import without_our_frame
from torchmedic.recovery.cross_entropy import CrossEntropyInParts
from torchmedic.recovery.early_spill import NEVER, EarlySpill
from torchmedic.recovery.random_calls import draws, generator_states
from torchmedic.recovery.workspaces import CONVOLUTIONS, Workspaces

if TYPE_CHECKING:
    from torchmedic.recovery.session import Session

# Calls that run a graph, and with it code of the user's. Once the graph runs, `backward.py` takes care of them.
_RUN_GRAPHS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_FAILED = object()


class Guard(TorchFunctionMode):
    """A mode at the bottom of the stack of the thread that trains."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._out = session.optimizers.out
        self.spill: EarlySpill | None = None  # looks at what the calls have saved
        self._special: dict[Any, bool] = {}  # calls that draw random numbers, run a graph or can be taken apart

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._out:
            self._bring_back(func, args, kwargs)
        put_back, graphs, call = None, 0, func
        if self._special.get(func, True):  # most calls are property reads and plain operations
            graphs = self._session.graphs_run
            self._special[func] = draws(func) or func in _RUN_GRAPHS or func is F.cross_entropy or func in CONVOLUTIONS
            if func is F.cross_entropy:
                call = self._cross_entropy
            elif func in CONVOLUTIONS:
                call = functools.partial(self._session.workspaces.convolution, func)
            elif draws(func):
                self._session.random.draws((kwargs or {}).get("generator"))
                put_back = generator_states(kwargs)
        try:
            result = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:
            without_our_frame(error)
            has_run_graph = func in _RUN_GRAPHS and self._session.graphs_run != graphs
            if has_run_graph or not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
                raise
            result = self._repeated(error, func, call, args, kwargs or {}, put_back)
            if result is _FAILED and func not in CONVOLUTIONS:
                raise
        if result is _FAILED:
            result = self._with_any_kernel(func, args, kwargs or {})
        if self.spill is not None and self.spill.next != NEVER:
            self.spill.called(result)
        return result

    def _repeated(self, error: BaseException, func: Any, call: Any, args: Any, kwargs: Any, put_back: Any) -> Any:
        """The result of the call, repeated with more room; `_FAILED` if no room could be made."""
        session = self._session
        started = time.monotonic()
        try:
            reason = session.reason_against()
            if reason:
                session.refuse(session.phase, reason)
                return _FAILED
            busy = frozenset(int(each.untyped_storage()._cdata) for each in strided(tensors_in((args, kwargs))))
            rooms = session.room.rooms(
                error, busy, is_update=session.is_updating, least=session.next_steps.parked_in_step
            )
            for room in rooms:
                if put_back is not None:
                    put_back()
                try:
                    session.in_parts.is_on |= func is F.cross_entropy
                    result = call(*args, **kwargs)
                except Exception as again:
                    if not is_out_of_memory(again):
                        return _FAILED
                    continue
                means = "parts" if room.means == "retry" and session.in_parts.made(result) else room.means
                session.recovered(session.phase, means, _name(func), room.nbytes, time.monotonic() - started)
                return result
            if func not in CONVOLUTIONS:
                session.nothing_helped(error)
        except KeyboardInterrupt:
            raise
        except Exception as failure:
            report_fault("recover.call", failure)
        return _FAILED

    def _with_any_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A convolution that has no room for its workspace.

        Raises:
            OutOfMemoryError: In torch's own words: there is no room for the result either.
        """
        session = self._session
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            without_our_frame(error)
            session.nothing_helped(error)
            raise
        session.recovered(session.phase, "kernel", _name(func), 0, 0.0)
        return result

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, in parts if memory has run out before."""
        parts = self._session.in_parts
        try:
            if not parts.is_on and parts.is_short(args, kwargs):
                self._session.recovered("backward", "parts", "cross_entropy", 0, 0.0, is_avoided=True)
            if parts.is_on and (loss := parts.result(args, kwargs)) is not None:
                return loss
        except Exception as error:
            if is_out_of_memory(error):
                raise
            parts.is_refused = True
            if not isinstance(error, IndexError):  # a target that is no class: the call itself says so
                report_fault("recover.loss", error)
        return F.cross_entropy(*args, **kwargs)

    def _bring_back(self, func: Any, args: Any, kwargs: Any) -> None:
        """Bring back tensors of optimizers that a call uses; others make room where there is none."""
        optimizers = self._session.optimizers
        used = list(strided(tensors_in((args, kwargs))))
        missing = optimizers.missing(used)
        if not missing:
            return
        busy = frozenset(int(each.untyped_storage()._cdata) for each in used)
        for storage in missing:
            self._session.bring_back(storage, busy)


class ReplayedCalls(TorchFunctionMode):
    """Makes the calls of a step that is computed again as the guard would: losses in parts, no kernel by chance."""

    def __init__(self, in_parts: CrossEntropyInParts, workspaces: Workspaces, spill: EarlySpill) -> None:
        super().__init__()
        self._in_parts = in_parts
        self._workspaces = workspaces
        self._spill = spill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._in_parts.result(args, kwargs or {}) if func is F.cross_entropy else None
        if result is None:
            call = functools.partial(self._workspaces.convolution, func) if func in CONVOLUTIONS else func
            result = call(*args, **(kwargs or {}))
        self._spill.called(result)
        return result


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "")).lstrip("_")


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in the arguments of a call, which are nested in lists, tuples and dictionaries at most."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def strided(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The tensors that have a storage of their own."""
    return (each for each in tensors if each.layout is torch.strided)
