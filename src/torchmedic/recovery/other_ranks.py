"""A backward pass that other ranks take part in, and whether this rank can go on alone where the pass failed.

DistributedDataParallel counts the gradients as they come, and sends those of a bucket once all of them are there. The
failed pass has counted the parameters that it came to; the others are still awaited. So the pass goes on with a new
graph for those alone: nothing is sent twice, and the other ranks wait a little longer.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.autograd.graph
from torch.nn.parallel import DistributedDataParallel

from torchmedic.contained import contained
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.script_code import is_function
from torchmedic.source.objects.graph import name_of, walk
from torchmedic.source.objects.living import live_modules

_MADE_BY_WRAPPER = "_DDPSinkBackward"  # passes gradients on
# Settings of the wrapper with which a gradient is not counted where it is added, or not told apart from its neighbours.
_SETTINGS = ("static_graph", "gradient_as_bucket_view", "mixed_precision")
_SHARDED = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
)


def are_there() -> bool:
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def reason_against(roots: Iterable[torch.Tensor]) -> str:
    """Why the pass cannot go on; empty if it can."""
    modules = live_modules()
    for place, name in _SHARDED:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None and any(isinstance(each, kind) for each in modules):
            return "the weights are spread over other ranks, which take part in this backward pass"
    for wrapper in _wrappers(modules):
        found = [name for name in _SETTINGS if getattr(wrapper, name, None)]
        if found:
            return f"other ranks take part in this backward pass, with {found[0]} of DistributedDataParallel"
    for node in walk(each.grad_fn for each in roots):
        name = name_of(node)
        if (is_function(node) and name != _MADE_BY_WRAPPER) or "CppNode" in name:
            return f"other ranks take part, and {name} may send something to them a second time"
    return ""


class Sent:
    """Which gradients of a pass the wrappers have counted.

    A gradient is added, and then counted. Where memory ends between the two, nobody can tell that to the wrapper.
    """

    def __init__(self) -> None:
        self._counted: set[int] = set()
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

    @contained("recover.ranks")
    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """A pass begins. The wrappers have put their hooks in place, so the hooks from here run after theirs."""
        self._counted.clear()
        for each in parameters:
            known = self._watched.get(id(each))
            if each.requires_grad and (known is None or known[0]() is not each):
                with unseen():
                    node = torch.autograd.graph.get_gradient_edge(each).node
                handle = node.register_hook(functools.partial(self._note, id(each)))
                self._watched[id(each)] = (weakref.ref(each), handle)

    def _note(self, key: int, *_: object) -> None:
        self._counted.add(key)

    def remove(self) -> None:
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def reason_against(self, wanted: Sequence[torch.Tensor], left: Sequence[torch.Tensor]) -> str:
        """Why the pass cannot go on for the parameters that are left; empty if it can."""
        left_ids = {id(each) for each in left}
        done = {id(each) for each in wanted} - left_ids
        for wrapper in _wrappers(live_modules()):
            mine = {id(each) for each in wrapper.parameters()}
            if mine & done - self._counted:
                return "memory ended while a gradient was sent to other ranks"
            if mine & done and not mine & left_ids:  # the last gradient of a wrapper ends the exchange
                return "other ranks take part, and the failed pass has sent all gradients already"
        return ""


def _wrappers(modules: Iterable[Any]) -> list[DistributedDataParallel]:
    return [each for each in modules if isinstance(each, DistributedDataParallel)]
