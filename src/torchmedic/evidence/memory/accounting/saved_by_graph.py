"""What the nodes of the live graphs have saved for backward: tensors that no variable need hold.

Read without running anything of the user's: a saved tensor that a hook has packed (a checkpoint, `save_on_cpu`) is not
unpacked, as that would compute or copy; what it was packed into is looked at instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.source.objects.graph import following

_RAW = "_raw_saved_"
_known: dict[type, tuple[str, ...]] = {}
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"})
_MAX_NEAR_NODES = 48  # that are searched for weights


class _Refusing(TorchDispatchMode):
    """Reading what was saved must compute nothing; whoever tries to is stopped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # of an operation that has saved what it made: no memory, no work
            return func(*args, **(kwargs or {}))
        raise RuntimeError("a saved tensor was packed by a hook")


def is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False  # a view whose base was changed in place: torch does not even say that


def tensors_saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that one node keeps alive; none where a backward has been through it."""
    found: list[torch.Tensor] = []
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
        except (RuntimeError, AttributeError):
            continue
        for each in raw if isinstance(raw, tuple | list) else (raw,):
            found += _inside(_content(node, name, each))
    context = getattr(node, "__dict__", None)  # of a Function of the user's: `ctx.x = x` keeps it too
    if isinstance(context, dict):
        for value in context.values():
            found += _inside(value)
    return found


def sequence_of(node: Any) -> int:
    """When a node was made, in its thread's count; -1 where it does not say."""
    try:
        return int(node._sequence_nr())
    except (AttributeError, RuntimeError, TypeError):
        return -1


def weights_of(node: Any) -> tuple[int, ...]:
    """The identities of the parameters that a node collects gradients for, also turned round or cast on the way."""
    found = []
    for after in following(node):
        way = after
        for _ in range(3):
            if way is None or way.name() not in _VIEWS:
                break
            way = way.next_functions[0][0]
        if way is not None and hasattr(way, "variable"):
            found.append(id(way.variable))
    return tuple(found)


def leaves_of(node: Any) -> list[torch.Tensor]:
    """The leaves whose gradients a node computes by itself."""
    found = [getattr(after, "variable", None) for after in following(node)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def weights_before(node: Any) -> tuple[int, ...]:
    """The identities of the parameters at the nearest nodes behind this one that have any."""
    found: list[int] = []
    pending, seen = [node], {node}
    while pending and len(seen) < _MAX_NEAR_NODES:
        each = pending.pop(0)
        weights = weights_of(each)
        found += weights
        if not weights:
            behind = following(each)
            pending += [after for after in behind if after not in seen]
            seen.update(behind)
    return tuple(found)


def _raw_names(kind: type) -> tuple[str, ...]:
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
    return found


def _content(node: Any, name: str, raw: Any) -> Any:
    if raw is None:
        return None
    try:
        return raw.data  # as it is kept: the tensor, or what a hook has made of it
    except AttributeError:
        pass  # torch before it could say
    except (RuntimeError, TypeError):
        return None
    try:
        with _Refusing():  # type: ignore[no-untyped-call]
            return getattr(node, name.replace(_RAW, "_saved_") if name != "_raw_saved_tensors" else "saved_tensors")
    except Exception:
        return None


def _inside(value: Any, depth: int = 2) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth and isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _inside(item, depth - 1)]
    return []
