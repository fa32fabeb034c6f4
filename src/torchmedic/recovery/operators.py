"""The operator that made a node of the graph, found by the name of the node."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

_NODE = re.compile(r"(.+)Backward\d+")
_OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Scalar")


class _Argument(NamedTuple):
    """An argument in the schema of an operator. Torch takes a while to tell its type."""

    name: str
    kind: str
    schema: Any

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("Tensor", "Optional[Tensor]")


class Operator:
    """The operator behind one type of node."""

    def __init__(self, node: Any) -> None:
        match = _NODE.fullmatch(type(node).__name__)
        name = _snake_case(match[1]) if match else ""
        self.name = name
        self.saved = frozenset(each.removeprefix("_saved_") for each in dir(type(node)) if each.startswith("_saved_"))
        self.function = (self._overload(name) or self._overload(f"_{name}")) if name else None
        schema = self.function._schema.arguments if self.function is not None else []
        self.arguments = [_Argument(each.name, str(each.type), each) for each in schema]
        same = getattr(torch.ops.aten, f"{name}_", None) if name else None
        self.in_place = None if self.function is None else getattr(same, self.function._overloadname, None)

    def _overload(self, name: str) -> Any:
        packet = getattr(torch.ops.aten, name, None)
        names = packet.overloads() if packet is not None else []
        for each in (each for each in _OVERLOADS if each in names):
            overload = getattr(packet, each)
            known = {argument.name for argument in overload._schema.arguments}
            if overload._schema.is_mutable or not {"self", "other", "input", "weight"} & self.saved <= known:
                continue
            if not any(str(argument.type) == "Tensor" for argument in overload._schema.arguments):
                continue  # an overload of Python's numbers
            return None if torch.Tag.nondeterministic_seeded in overload.tags else overload
        return None


def _snake_case(name: str) -> str:
    """`max_pool2d_with_indices` for `MaxPool2DWithIndices`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", re.sub(r"(\d)D", r"\1d", name)).lower()
