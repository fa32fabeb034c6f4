"""Which line of the user's made an entry of a batch that a library has passed on to the model."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

import torch

from torchmedic.evidence.dataset_item import collations_in_use
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.batch_entries import entries_made
from torchmedic.source.syntax import function_of, has_line, syntax_tree


def entry_of(frames: list[Frame], tensor: torch.Tensor) -> tuple[str, str, ast.expr] | None:
    """The name of a tensor in the batch that frames hold, and the only expression that made it."""
    for frame in frames:
        for value in list(frame.variables.values()):
            entries = value.items() if isinstance(value, Mapping) else ()
            for name, entry in entries:
                if entry is tensor and isinstance(name, str):
                    made = made_at(name)
                    return (name, *made) if made is not None else None
    return None


def made_at(name: str) -> tuple[str, ast.expr] | None:
    """The only expression that made an entry of the batches, in the collate function where that has one."""
    given = list(entries_made(name))
    given = [each for each in given if _is_in_collation(*each)] or given  # after it, nothing changes a batch
    return given[0] if len(given) == 1 else None


def _is_in_collation(file: str, value: ast.expr) -> bool:
    """Whether an expression stands in a function that makes the batches of a loader."""
    for _, collate in collations_in_use():
        inner = getattr(collate, "data_collator", collate)  # the Trainer of Hugging Face puts its own around it
        function = inner if inspect.isroutine(inner) else type(inner).__call__
        code = getattr(function, "__code__", None)
        around = function_of(syntax_tree(file), code) if code is not None and code.co_filename == file else None
        if around is not None and has_line(around, value.lineno):
            return True
    return False
