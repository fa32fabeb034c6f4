"""Operations that pick rows by number: which tensor is the table, which the index, and what bounds it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, Call, raising_call, read

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
NO_BOUND = 1 << 62


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """One index into one dimension of one table."""

    op: str
    table: Any
    index: torch.Tensor
    bound: int
    wraps: bool = False
    layer: torch.nn.Module | None = None
    # The table and its size in words: "the `Embedding` has 20 rows", and beside an index: "20 rows".
    table_words: str
    size_words: str


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
    if op in ("index", "index_put"):
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
            given = classes if isinstance(classes, int) and classes > 0 else None
            words = f"{given} classes" if given is not None else "no negative index"
            return [
                Lookup(
                    op=op,
                    table=None,
                    index=index,
                    bound=given if given is not None else NO_BOUND,
                    table_words=f"`one_hot` takes {words}",
                    size_words=words,
                )
            ]
        return []
    return list(_along(call, op))


def _embedding(frames: list[Frame], table: Any, index: Any, op: str) -> list[Lookup]:
    if not (isinstance(table, torch.Tensor) and isinstance(index, torch.Tensor)) or table.dim() != 2:
        return []
    layer = frames[-2].module if len(frames) > 1 else None
    named = isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.weight is table
    rows = int(table.shape[0])
    words = f"{rows} row{'s' if rows != 1 else ''}"
    return [
        Lookup(
            op=op,
            table=table,
            index=index,
            bound=rows,
            layer=layer if named else None,
            table_words=(f"the `{type(layer).__name__}`" if named else "the table") + f" has {words}",
            size_words=words,
        )
    ]


def _along(call: Call, op: str) -> Iterator[Lookup]:
    table = call.get(0, "input")
    if not isinstance(table, torch.Tensor):
        return
    if op in _FLAT:
        index = call.get(1, "index")
        if isinstance(index, torch.Tensor):
            words = f"{table.numel()} elements"
            yield Lookup(
                op=op,
                table=table,
                index=index,
                bound=table.numel(),
                wraps=True,
                table_words=f"the tensor has {words}",
                size_words=words,
            )
        return
    if op not in _ALONG:
        return
    at_dim, at_index, wraps = _ALONG[op]
    dim, index = call.get(at_dim, "dim"), call.get(at_index, "indices" if op == "take_along_dim" else "index")
    if isinstance(index, int):
        index = torch.tensor(index)
    if isinstance(dim, int) and isinstance(index, torch.Tensor) and -table.dim() <= dim < table.dim():
        yield _in_dimension(op, table, index, dim % table.dim(), wraps=wraps)


def _in_dimension(op: str, table: torch.Tensor, index: torch.Tensor, dim: int, *, wraps: bool) -> Lookup:
    size = int(table.shape[dim])
    return Lookup(
        op=op,
        table=table,
        index=index,
        bound=size,
        wraps=wraps,
        table_words=f"dimension {dim} of {list(table.shape)} has size {size}",
        size_words=f"size {size}",
    )


def _subscript(call: Call) -> Iterator[Lookup]:
    """`x[i]`, `x[:, index]`, `x[rows, columns] = y`: one lookup per indexed dimension."""
    table, index = (argument.value for argument in call.arguments[:2])
    if not isinstance(table, torch.Tensor):
        return
    parts = list(index) if isinstance(index, tuple) else [index]
    node = call.arguments[1].node
    if index is UNKNOWN and isinstance(node, ast.Tuple):
        # One part that cannot be read (a call) does not hide the others.
        parts = [read(element, call.frame) for element in node.elts]
    taken = sum(_dimensions(part) for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += table.dim() - taken
            continue
        whole = _as_index(part)
        if whole is not None and dim < table.dim():
            yield _in_dimension("[]", table, whole, dim, wraps=True)
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
