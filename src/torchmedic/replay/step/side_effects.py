"""What a replay must not do: free graphs, update weights, draw batches, save files, leave tensors changed."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.graph
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from torchmedic.observe.numbers.func_losses import without_wrapper
from torchmedic.replay.isolation.outside_world import exchanges_answered
from torchmedic.replay.isolation.torch_state import replaced, set_version
from torchmedic.replay.step.lone_exchange import answer
from torchmedic.replay.step.result import BackwardCall, ReplayResult
from torchmedic.replay.trace.microscope import written_by
from torchmedic.replay.trace.operations import Geometry, geometry_of, storage_of
from torchmedic.source.objects.graph import leaves_behind
from torchmedic.source.spots import user_spots


@contextlib.contextmanager
def no_side_effects(
    played: ReplayResult, optimizers: Sequence[Any], batch: Any, *, backward: bool, keep_graphs: bool
) -> Iterator[None]:
    """Backward keeps its graph, updates update nothing, loaders repeat their batch, nothing is saved."""
    engine = torch.autograd.graph._engine_run_backward
    depth = 0
    wrapped: set[int] = set()  # wrappers for several ranks that the replay has taken off

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            keeps = any(args[1:3])  # retain_graph or create_graph
            inputs = tuple(args[3]) if len(args) > 3 else ()
            # A wrapper of `torch.func` is of no use once its transform is over.
            roots = tuple(root if (inner := without_wrapper(root)) is None else inner for root in t_outputs)
            played.backward_calls.append(BackwardCall(roots, user_spots(sys._getframe(1)), keeps, inputs))
        wants_result = not kwargs.get("accumulate_grad", True)
        if not backward and not wants_result:
            return None
        arguments = list(args)
        if keep_graphs and len(arguments) > 1:
            arguments[1] = True  # keep the graph: parts of it may still be needed by the real step
        depth += 1
        try:
            if wrapped and not wants_result and not (len(args) > 3 and args[3]):
                result = _past_reducers(engine, t_outputs, arguments)
            else:
                result = engine(t_outputs, *arguments, **kwargs)
        finally:
            depth -= 1
        if wants_result and not depth:
            played.returned += [gradient for gradient in result if gradient is not None]
        return result

    def unwrapped(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.add(id(wrapper))
        return wrapper.module(*args, **kwargs)

    def exchange(method: str, size: int, args: tuple[Any, ...]) -> Any:
        if played.backward_calls and not depth:
            return None  # the gradients are exchanged by hand: the step of this rank alone is over
        done = answer(method, size, args)
        played.answered |= done is not None
        return done

    def next_batch(iterator: Any) -> Any:
        if batch is None:
            raise StopIteration
        return batch

    def iterate(loader: Any) -> Iterator[Any]:
        return _repeated(batch, loader)

    scheduler = __import__("torch.optim.lr_scheduler", fromlist=["*"]).LRScheduler

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", next_batch))
        stack.enter_context(replaced(DataLoader, "__iter__", iterate))
        stack.enter_context(replaced(scheduler, "step", lambda *args, **kwargs: None))
        stack.enter_context(replaced(torch, "save", lambda *args, **kwargs: None))
        # Other ranks are not in this replay, and would be waited for.
        for wrapper in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
            stack.enter_context(replaced(wrapper, "forward", unwrapped))
        stack.enter_context(replaced(GradScaler, "step", lambda scaler, optimizer, *args, **kwargs: optimizer.step()))
        stack.enter_context(replaced(GradScaler, "update", lambda *args, **kwargs: None))
        stack.enter_context(replaced(GradScaler, "unscale_", lambda *args, **kwargs: None))
        with contextlib.suppress(AttributeError, RuntimeError):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if played.answers:
            stack.enter_context(exchanges_answered(exchange))
        for optimizer in optimizers:
            stack.enter_context(replaced(optimizer, "step", _touch(optimizer, played)))
        yield


def _repeated(batch: Any, loader: Any) -> Iterator[Any]:
    """What a loader gives that a replay itself begins to read: as many batches as it has, and no worker is started."""
    try:
        given: Iterator[Any] = itertools.repeat(batch, 0 if batch is None else len(loader))
    except (TypeError, NotImplementedError):  # of unknown length
        given = itertools.repeat(batch)
    return given


def _past_reducers(engine: Callable[..., Any], roots: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Backward that sets the gradients itself.

    DistributedDataParallel has a hook behind every parameter, which sends the gradient to the other ranks and counts it
    for the real step. The hook is called when autograd adds a gradient to a parameter, and not when it returns it.
    """
    leaves = tuple(leaves_behind(roots))
    if not leaves:
        engine(roots, *arguments, allow_unreachable=True, accumulate_grad=True)
        return ()
    given = list(arguments)
    given[3:4] = [leaves]
    found = engine(roots, *given, allow_unreachable=True, accumulate_grad=False)
    with torch.no_grad():
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return ()


def _touch(optimizer: Any, played: ReplayResult) -> Callable[..., Any]:
    """A step that changes no weight but is a write to each of them, as the real one would be."""

    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        played.updates.append((optimizer, len(played.backward_calls)))
        with torch.no_grad():
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.mul_(1)  # bit for bit the same value, one version later
        return loss

    return step


class RestoreWrites(TorchDispatchMode):
    """On exit every tensor that is older than the replay is what it was, version and all.

    A tensor is copied at the first write to it: the optimizer is held back, so most steps write to few tensors.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._tensors = {id(tensor): tensor for tensor in weights if tensor.layout is torch.strided}
        self._versions = {key: tensor._version for key, tensor in self._tensors.items() if not tensor.is_inference()}
        self._watched = {key for tensor in self._tensors.values() if (key := storage_of(tensor)) is not None}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._others: dict[tuple[int, Geometry], tuple[torch.Tensor, torch.Tensor]] = {}
        self._born: set[int] = set()  # memory that the replay itself has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not _changes_nothing(func, args):
            for tensor in written_by(func, args, kwargs):
                self._keep(tensor)
        result = func(*args, **kwargs)
        made = _storages(result)
        if made:
            self._born |= made - _storages((args, kwargs))
        return result

    @property
    def has_written(self) -> bool:
        """Whether something was written to memory that is older."""
        return bool(self._copies or self._others)

    def _keep(self, tensor: torch.Tensor) -> None:
        key = storage_of(tensor)
        if key in self._watched:
            if key not in self._copies:
                storage = tensor.untyped_storage()
                self._copies[key] = (storage, storage.clone())
        elif key is not None and key not in self._born and tensor.layout is torch.strided and not tensor.is_meta:
            place = (key, geometry_of(tensor))  # of a view of something big, that part alone
            if place not in self._others:
                view = tensor.detach()
                self._tensors.setdefault(id(tensor), tensor)
                if not tensor.is_inference():
                    self._versions.setdefault(id(tensor), tensor._version)
                self._others[place] = (view, view.clone())

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        for storage, copy in self._copies.values():
            storage.copy_(copy)
        with torch.no_grad():
            for view, before in reversed(self._others.values()):
                view.copy_(before)
        self._copies.clear()
        self._others.clear()
        moved = [
            (tensor, version)
            for key, version in self._versions.items()
            if (tensor := self._tensors[key])._version != version
        ]
        for tensor, version in moved:
            with contextlib.suppress(Exception):
                set_version(tensor, version)


def _storages(values: Any) -> set[int]:
    """The memory of what an operation takes or gives."""
    found = set()
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            key = storage_of(value)
            if key is not None:
                found.add(key)
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
    return found


def _changes_nothing(func: Any, args: Any) -> bool:
    """The write by which a held-back optimizer shows that it would have written."""
    return func._schema.name == "aten::mul_" and len(args) == 2 and isinstance(args[1], int) and args[1] == 1
