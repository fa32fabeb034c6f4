"""A DistributedDataParallel of this rank alone stands in for that of the job, so that its settings can be tried.

Its averaging is the same code of torch's, in a group of one rank: no other rank is asked, and the module is a copy, as
the parameters of the job's own carry the hooks of the job's reducer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.runner import Runner
from torchmedic.source.objects.finite import is_finite

_MAX_SHARE = 0.1  # share of the free memory of the host that the weights may take; gradients and buckets come on top
_WAIT = timedelta(seconds=30)


class CannotStandIn(Exception):
    """The module of the job cannot be copied, or torch has no group of one rank."""


def two_steps(
    runner: Runner, wrapper: DistributedDataParallel, left_out: Collection[str] = (), **settings: Any
) -> ReplayResult:
    """Replay a step twice, with a wrapper of other settings. The second result is returned if the first has no error.

    Whether all parameters have got their gradient is asked by DistributedDataParallel at the next forward. The
    parameters `left_out` get none in the first of the two: it stands in for an earlier step that did not use them.

    Raises:
        CannotStandIn: With the reason.
    """
    lone = _made(wrapper, settings)
    played = ReplayResult()
    is_trained = {name: parameter.requires_grad for name, parameter in lone.module.named_parameters()}
    for unused in (left_out, ()):
        for name, parameter in lone.module.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(is_trained[name] and name not in unused)
        played = runner.play(_in_place_of(wrapper, lone), _Allowed(lone.process_group))
        if played.error is not None:
            return played
    given = [parameter.grad for parameter in lone.module.parameters() if parameter.grad is not None]
    roots = [root.detach() for root in played.roots]
    played.loss = float(roots[-1].item()) if roots and roots[-1].numel() == 1 else None
    played.loss_finite = bool(roots) and all(is_finite(root) for root in roots)
    played.gradients_finite = all(is_finite(gradient) for gradient in given) if given else None
    return played


def _made(wrapper: DistributedDataParallel, settings: dict[str, Any]) -> DistributedDataParallel:
    size = sum(each.numel() * each.element_size() for each in wrapper.module.state_dict().values())
    if size > _MAX_SHARE * psutil.virtual_memory().available:
        raise CannotStandIn("the model is too large to be copied")
    try:
        with _unwatched():
            return DistributedDataParallel(copy.deepcopy(wrapper.module), process_group=_group(wrapper), **settings)
    except Exception as error:
        raise CannotStandIn(str(error)) from error


def _group(wrapper: DistributedDataParallel) -> Any:
    """A group of one rank, which the job does not know of."""
    distributed: Any = torch.distributed
    store = distributed.HashStore()
    group = distributed.ProcessGroup(store, 0, 1)
    kind = distributed.ProcessGroup.BackendType.GLOO
    backend = distributed.ProcessGroupGloo(distributed.PrefixStore("0", store), 0, 1, _WAIT)
    for device in dict.fromkeys((torch.device("cpu"), torch.device(wrapper.device.type))):
        group._register_backend(device, kind, backend)
    group._set_default_backend(kind)
    group._set_group_name("torchmedic")
    return group


_KIND: Any = DistributedDataParallel
_FORWARD = _KIND.forward


@contextlib.contextmanager
def _in_place_of(wrapper: DistributedDataParallel, lone: DistributedDataParallel) -> Iterator[None]:
    """Send calls of the job's wrapper to the lone one. Entered in a replay, which has replaced `forward` itself."""
    taken_off = _KIND.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module is not wrapper:
            return taken_off(module, *args, **kwargs)
        return _FORWARD(lone, *args, **kwargs)

    _KIND.forward = forward
    try:
        with _unwatched():
            yield
    finally:
        _KIND.forward = taken_off


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Keep the lone wrapper out of the log of this rank, which its supervisor compares with others."""
    watched = _KIND._pre_forward
    _KIND._pre_forward = getattr(watched, "__wrapped__", watched)
    try:
        yield
    finally:
        _KIND._pre_forward = watched


class _Allowed(TorchDispatchMode):
    """Lets the collectives of one group through, past the modes of the replay that refuse all of them."""

    def __init__(self, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and any(self._is_ours(each) for each in args):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_ours(self, argument: Any) -> bool:
        if not isinstance(argument, torch.ScriptObject) or "ProcessGroup" not in str(argument._type()):
            return False
        return bool(torch.distributed.ProcessGroup.unbox(argument) == self._group)
