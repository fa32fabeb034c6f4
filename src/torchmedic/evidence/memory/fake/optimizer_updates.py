"""The step of an optimizer on fakes: the state that its first one makes, and what it needs while it steps.

One parameter of each shape stands for all of that shape, as a model has many parameters and few shapes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchmedic.evidence.memory.fake.peak import UPDATE, Counting, rounded
from torchmedic.replay.isolation.torch_state import replaced

Alike = list[list[torch.Tensor]]


def update(optimizer: Any, ledger: Counting) -> None:
    """Play the step of an optimizer, without the hooks that observe it, and count for all of its parameters."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    everything = [group["params"] for group in groups]
    alike = [_by_shape(params) for params in everything]
    without = {id(params[0]) for shapes in alike for params in shapes if not optimizer.state.get(params[0])}
    live = ledger.live
    earlier = live.by_phase.get(UPDATE, 0)  # of another optimizer
    before = live.by_phase[UPDATE] = live.now
    try:
        for group, shapes in zip(groups, alike, strict=True):
            group["params"] = [params[0] for params in shapes]
        with torch.no_grad(), ledger.updating():
            inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params
    for_a_while = live.by_phase[UPDATE] - live.now
    kept = {id(params[0]): _nbytes(optimizer.state.get(params[0])) for shapes in alike for params in shapes}
    state = sum(len(params) * kept[id(params[0])] for shapes in alike for params in shapes if id(params[0]) in without)
    if any(_is_at_once(group) for group in groups):
        for_a_while = int(for_a_while * _times(alike))
    ledger.new_state += state
    live.reach(earlier, UPDATE)
    live.reach(before + state + for_a_while, UPDATE)


def _by_shape(params: list[torch.Tensor]) -> Alike:
    """The parameters that have a gradient, grouped by shape."""
    found: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor in params:
        if tensor.grad is not None:
            found.setdefault((tensor.shape, tensor.dtype, tensor.device, tensor.layout), []).append(tensor)
    return list(found.values())


def _is_at_once(group: dict[str, Any]) -> bool:
    """Whether all parameters are updated together, which torch does by itself on a card."""
    if "foreach" not in group or group.get("fused"):
        return False
    wished = group["foreach"]
    return bool(wished) if wished is not None else any(tensor.is_cuda for tensor in group["params"])


def _times(alike: list[Alike]) -> float:
    """How many times more there is than was played."""
    played = sum(params[0].nbytes for shapes in alike for params in shapes)
    return sum(tensor.nbytes for shapes in alike for params in shapes for tensor in params) / max(1, played)


def _nbytes(state: Any) -> int:
    values = state.values() if isinstance(state, dict) else ()
    return sum(rounded(each.nbytes, each.device.type) for each in values if isinstance(each, torch.Tensor))


@contextlib.contextmanager
def stepping_on_fakes(optimizer: Any, ledger: Counting) -> Iterator[None]:
    """Let `optimizer.step()` count."""

    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update(optimizer, ledger)
        return loss

    with replaced(optimizer, "step", step):
        yield
