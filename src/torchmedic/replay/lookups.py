"""Operations that pick rows by number: which tensor is the table, which the index, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.replay.calls import UNKNOWN, Call, raising_call
from torchmedic.replay.frames import Frame

# name -> (position of the dimension, of the index, whether -1 counts from the end), the table being argument 0
_ALONG = {
    "index_select": (1, 2, False),
    "gather": (1, 2, False),
    "scatter": (1, 2, False),
    "scatter_add": (1, 2, False),
    "scatter_reduce": (1, 2, False),
    "index_add": (1, 2, False),
    "index_copy": (1, 2, False),
    "index_reduce": (1, 2, False),
    "index_fill": (1, 2, True),
    "select": (1, 2, True),
    "take_along_dim": (2, 1, True),
}
_FLAT = frozenset({"take", "put"})


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """One index into one dimension of one table."""

    op: str
    table: Any
    index: torch.Tensor
    bound: int
    wraps: bool = False
    what: str = "the dimension"
    unit: str = "element"
    layer: torch.nn.Module | None = None


def lookup_of(frames: list[Frame]) -> list[Lookup]:
    """What the raising operation looked up; several where several dimensions were indexed at once."""
    if not frames:
        return []
    last = frames[-1]
    if last.function in ("embedding", "embedding_bag") and not last.is_user:
        return _embedding(frames, last.variables.get("weight"), last.variables.get("input"), last.function)
    call = raising_call(last)
    if call is None:
        return []
    op = call.op.rstrip("_")
    if op == "index":
        return list(_subscript(call))
    if op in ("embedding", "embedding_bag"):
        table, index = (call.get(0, "weight"), call.get(1, "indices"))
        if isinstance(table, torch.Tensor) and table.dim() != 2:  # `F.embedding(index, table)`, not `torch.embedding`
            table, index = index, table
        return _embedding(frames, table, index, op)
    if op == "one_hot":
        classes = call.get(1, "num_classes")
        index = call.get(0, "tensor")
        if isinstance(index, torch.Tensor):
            bound = classes if isinstance(classes, int) and classes > 0 else 1 << 62
            return [Lookup(op=op, table=None, index=index, bound=bound, what="`one_hot`", unit="class")]
        return []
    return list(_along(call, op))


def _embedding(frames: list[Frame], table: Any, index: Any, op: str) -> list[Lookup]:
    if not (isinstance(table, torch.Tensor) and isinstance(index, torch.Tensor)) or table.dim() != 2:
        return []
    layer = frames[-2].module if len(frames) > 1 else None
    named = isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.weight is table
    return [
        Lookup(
            op=op,
            table=table,
            index=index,
            bound=int(table.shape[0]),
            what=f"the `{type(layer).__name__}`" if named else "the table",
            unit="row",
            layer=layer if named else None,
        )
    ]


def _along(call: Call, op: str) -> Iterator[Lookup]:
    table = call.get(0, "input")
    if not isinstance(table, torch.Tensor):
        return
    if op in _FLAT:
        index = call.get(1, "index")
        if isinstance(index, torch.Tensor):
            yield Lookup(op=op, table=table, index=index, bound=table.numel(), wraps=True, what="the tensor")
        return
    if op not in _ALONG:
        return
    at_dim, at_index, wraps = _ALONG[op]
    dim, index = call.get(at_dim, "dim"), call.get(at_index, "indices" if op == "take_along_dim" else "index")
    if isinstance(index, int):
        index = torch.tensor(index)
    if isinstance(dim, int) and isinstance(index, torch.Tensor) and -table.dim() <= dim < table.dim():
        yield Lookup(
            op=op,
            table=table,
            index=index,
            bound=int(table.shape[dim]),
            wraps=wraps,
            what=f"dimension {dim % table.dim()} of {list(table.shape)}",
        )


def _subscript(call: Call) -> Iterator[Lookup]:
    """`x[i]`, `x[:, index]`, `x[rows, columns] = y`: one lookup per indexed dimension."""
    table, index = (argument.value for argument in call.arguments[:2])
    if not isinstance(table, torch.Tensor) or index is UNKNOWN:
        return
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dimensions(part) for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += table.dim() - taken
            continue
        whole = _as_index(part)
        if whole is not None and dim < table.dim():
            yield Lookup(
                op="[]",
                table=table,
                index=whole,
                bound=int(table.shape[dim]),
                wraps=True,
                what=f"dimension {dim} of {list(table.shape)}",
            )
        dim += _dimensions(part)


def _dimensions(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _as_index(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return None if part.dtype in (torch.bool, torch.uint8) else part
    if isinstance(part, bool) or not isinstance(part, int | list | tuple | range):
        return None
    try:
        return torch.as_tensor(list(part) if isinstance(part, range) else part)
    except (ValueError, TypeError, RuntimeError):
        return None
