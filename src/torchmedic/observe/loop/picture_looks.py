"""Whether the pictures of a batch have the shape of channels first, and the values in the order of channels last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.step.items import through_subsets
from torchmedic.source.user_variables import locals_of, user_modules

_CHANNELS = (2, 3, 4)
_COMPARED = 3  # pictures
_MAX_DIFFERENCE = 2e-3  # of the range of a channel
_MAX_FRAMES = 12
_SMOOTHER = 0.6  # at most so much of the roughness of another picture


class CutPictures(NamedTuple):
    """What holds the pictures, their shape in the batch, and how many were compared."""

    name: str
    shape: tuple[int, int, int]
    compared: int


def cut_pictures(batch: Any, dataset: Any, indices: Any, frame: FrameType | None) -> CutPictures | None:
    """Compare the pictures of a batch with those that they were made of, where these are in sight."""
    fields = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
    for field in fields:
        if type(field) is not torch.Tensor or field.dim() != 4 or not field.is_cpu or field.requires_grad:
            continue
        channels, height, width = field.shape[1:]
        if channels not in _CHANNELS or width == channels or len(field) != len(indices):
            continue
        some = list(zip(field[:_COMPARED].double(), indices[:_COMPARED], strict=True))
        for name, table in _tables(dataset, frame):
            with suppress(Exception):  # a table of the user's class, an index that is no number
                pairs = [(row, _picture(table, through_subsets(dataset, index))) for row, index in some]
                if all(each.shape == (height, width, channels) and _is_cut(row, each) for row, each in pairs):
                    return CutPictures(name, (channels, height, width), len(pairs))
    return None


def _tables(dataset: Any, frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """What may hold the pictures as they were: attributes of the dataset, and variables of the script."""
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    named = [(f"self.{name}", value) for name, value in getattr(dataset, "__dict__", {}).items()]
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        named += locals_of(frame)
        frame = frame.f_back
    for _, variables in user_modules():
        named += variables.items()
    for name, value in named:
        is_table = isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"
        if (is_table and len(value.shape) == 4) or (type(value) is list and hasattr(next(iter(value), 0), "shape")):
            yield name, value


def _picture(table: Any, index: Any) -> torch.Tensor:
    found = table[index]
    return (found.detach() if isinstance(found, torch.Tensor) else torch.from_numpy(found.copy())).double()


def _is_cut(row: torch.Tensor, picture: torch.Tensor) -> bool:
    """Whether each channel of a row follows the values of a picture in their order, and not its own channel."""
    given, moved = row.reshape(len(row), -1), picture.permute(2, 0, 1)
    if not _follows(given, picture.reshape(len(row), -1)) or _follows(given, moved.reshape(len(row), -1)):
        return False
    # Where the table itself has a wrong shape, the pictures of the batch are the smoother ones.
    return _roughness(picture.reshape(row.shape)) > _SMOOTHER * _roughness(moved)


def _roughness(picture: torch.Tensor) -> float:
    """How much neighbouring pixels differ."""
    return float(picture.diff(dim=1).abs().mean() + picture.diff(dim=2).abs().mean())


def _follows(given: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether each row is another one times a factor, plus a number: pictures are scaled, channel by channel."""
    values, given = (each - each.mean(1, keepdim=True) for each in (values, given))
    spread = values.square().sum(1, keepdim=True)
    if bool((spread == 0).any()):
        return False
    factors = (given * values).sum(1, keepdim=True) / spread
    largest = given.abs().amax(1)
    difference = (given - factors * values).abs().amax(1)
    return bool((largest > 0).all() and (difference <= _MAX_DIFFERENCE * largest).all())
