"""The number of samples of a loader and the size of its batches, if the script itself makes the tensors."""

from __future__ import annotations

import ast
import math

from torchmedic.supervise.preflight.constants import Constants, Unknown, name_of
from torchmedic.supervise.preflight.facts import Loader

_SIZES_ONLY = ("randn", "rand", "zeros", "ones", "empty")


def batch_bytes(loader: Loader, constants: Constants) -> int | None:
    """Bytes of the largest batch; None if unknown."""
    shapes = _shapes(loader, constants)
    if not shapes or not loader.batch_size or "collate_fn" in loader.arguments:
        return None
    return sum(width * min(loader.batch_size, shape[0]) * math.prod(shape[1:]) for width, shape in shapes)


def dataset_length(loader: Loader, constants: Constants) -> int | None:
    shapes = _shapes(loader, constants)
    return shapes[0][1][0] if shapes else None


def _shapes(loader: Loader, constants: Constants) -> list[tuple[int, list[int]]]:
    """Bytes per element and shape of every tensor of a TensorDataset; empty if one of them is unknown."""
    data = constants.expression(loader.arguments.get("dataset"))
    if not (isinstance(data, ast.Call) and name_of(data) == "TensorDataset" and data.args):
        return []
    if loader.arguments.keys() & {"batch_sampler", "sampler"}:
        return []
    found = []
    for part in data.args:
        made = constants.expression(part)
        shape = _shape(made, constants) if isinstance(made, ast.Call) else None
        if not shape or made is None:
            return []
        found.append((8 if name_of(made) == "randint" else 4, shape))
    return found


def _shape(made: ast.Call, constants: Constants) -> list[int] | None:
    """The shape in `torch.randn(2, 3)`, `torch.zeros((2, 3))` or `torch.randint(0, 5, (2, 3))`; None if unknown."""
    if any(word.arg in ("dtype", "size") for word in made.keywords):
        return None
    try:
        if name_of(made) in _SIZES_ONLY:
            given = [constants.value(each) for each in made.args]
            sizes = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        elif name_of(made) == "randint":
            sizes = next((value for each in made.args if isinstance(value := constants.value(each), list)), [])
        else:
            return None
    except Unknown:
        return None
    return sizes if all(isinstance(number, int) and number >= 0 for number in sizes) else None
