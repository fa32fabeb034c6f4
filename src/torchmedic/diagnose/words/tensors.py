"""Words and places that the rules about live tensors share."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchmedic.evidence.data_makers import attribute_with
from torchmedic.evidence.dataset_item import line_of_dtype
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.items import as_tuple
from torchmedic.records import Location, Role
from torchmedic.replay.trace.operations import storage_of
from torchmedic.source.live_frames import place
from torchmedic.source.lookup.failing_call import Argument, Call, raising_call, read
from torchmedic.source.lookup.layer_construction import built_at, module_path
from torchmedic.source.lookup.line_accesses import NO_ACCESSES, accesses_by_line
from torchmedic.source.lookup.origins import Origin, origin_of, user_argument
from torchmedic.source.objects.parts import is_users


def shape(tensor: torch.Tensor | torch.Size | tuple[int, ...] | list[int]) -> str:
    """`[4, 16]`."""
    return str(list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor))


def dtype(tensor: torch.Tensor | torch.dtype) -> str:
    """`float32`."""
    return str(tensor.dtype if isinstance(tensor, torch.Tensor) else tensor).removeprefix("torch.")


def count(number: int, noun: str) -> str:
    """`1 row`, `3 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def layer_of(evidence: RaisedEvidence, call: Call | None = None) -> nn.Module | None:
    """The layer of a library whose `forward` the exception came out of, if it came out of one."""
    if call is not None and call.frame.is_user:
        return None
    if evidence.is_traced:  # torch.compile looks through code that has no frame
        return next((each for each in evidence.traced_modules[-1:] if not is_users(type(each))), None)
    modules = (frame.module for frame in reversed(evidence.library_frames))
    return next((module for module in modules if module is not None and not is_users(type(module))), None)


def layer_name(evidence: RaisedEvidence, layer: nn.Module) -> str:
    """A layer as the user knows it: `features.3` (Conv2d)."""
    owned = module_path(evidence.frames, layer)
    kind = type(layer).__name__
    return f"`{owned[1]}` ({kind})" if owned is not None else f"`{kind}`"


def origin(evidence: RaisedEvidence, value: Any) -> Origin | None:
    """The statement of the user's that made a value which the failing expression was given."""
    passed = user_argument(evidence.frames, value)
    return None if passed is None else origin_of(evidence.frames, passed[0], passed[1].node)


def origin_of_whole(evidence: RaisedEvidence, value: torch.Tensor) -> Origin | None:
    """The statement that made a tensor, or the tensor of which it is a slice: `x` in `model(x[i : i + 8])`.

    A slice has the dtype and the values of the whole tensor, but another shape.
    """
    frame = evidence.user_frame
    found = origin(evidence, value)
    call = raising_call(frame) if frame is not None and found is None else None
    for argument in call.arguments if call is not None else ():
        if frame is not None and isinstance(argument.node, ast.Subscript):
            whole = read(argument.node.value, frame)
            if isinstance(whole, torch.Tensor) and storage_of(whole) == storage_of(value) is not None:
                return origin_of(evidence.frames, frame, argument.node.value)
    return found


def made_here(evidence: RaisedEvidence, value: Any, what: str, *, whole: bool = False) -> Location | None:
    """Where a value came from, labelled: `x` becomes [4, 16] here. `whole` takes the tensor for its slice."""
    found = origin_of_whole(evidence, value) if whole else origin(evidence, value)
    if found is None:
        return None
    return found.location("origin", came_to_be(found, what))


def items_become(evidence: RaisedEvidence, tensor: torch.Tensor, role: Role = "cause") -> Location | None:
    """The line of a dataset that gives a tensor of the batch its dtype."""
    made = line_of_dtype(evidence.incident, tensor)
    if made is None:
        return None
    label = f"items become {dtype(tensor)} here"
    indices, row = as_tuple(evidence.incident.batch_indices), tensor.detach()[:1]
    if len(indices) == 1 and isinstance(indices[0], list | tuple):
        indices = tuple(indices[0])
    if made.owner is not None and len(row) and type(indices[0]) is int:
        held = attribute_with(made.owner, indices[0], row[0], of_dtype=True)
        reads = accesses_by_line(made.file).get(made.line, NO_ACCESSES).reads
        if held is not None and tuple(held.name.split(".")) in reads and not isinstance(held.value, ast.Name):
            return held.location(role, label)  # the line only hands out what the data set already holds
    return place(role, made.file, made.line, label)


def came_to_be(found: Origin, what: str) -> str:
    """The label of an origin: what happens to the value there, or that what holds it comes from there."""
    return f"`{found.name}`, which holds it, comes from here" if found.holds else f"`{found.name}` {what} here"


def built_here(evidence: RaisedEvidence, layer: nn.Module | None, label: str) -> Location | None:
    return built_at(evidence.frames, layer, label) if layer is not None else None


def fed_by(evidence: RaisedEvidence, layer: nn.Module | None) -> str:
    """What comes before a layer in its `nn.Sequential`, as evidence; empty where it stands in none or first."""
    owners = [frame.module for frame in reversed(evidence.frames) if not frame.is_user]
    for owner in [*reversed(evidence.traced_modules), *owners]:
        if isinstance(owner, nn.Sequential):
            children = list(owner.named_children())
            for (_, before), (name, child) in itertools.pairwise(children):
                if child is layer:
                    return f"it is number {name} of an `nn.Sequential`, after `{type(before).__name__}`"
    return ""


def incomplete_batch(evidence: RaisedEvidence) -> tuple[int, int] | None:
    """The size of the batch being trained on and that of a full one, if a live DataLoader says it is not full."""
    batch = next((tensor for tensor in evidence.incident.batch if tensor.dim()), None)
    if batch is None:
        return None
    have = int(batch.shape[0])
    full = {
        loader.batch_size
        for frame in evidence.frames
        if frame.is_user
        for loader in _loaders([*frame.variables.values(), *frame.live.f_globals.values()])
        if isinstance(loader.batch_size, int) and not loader.drop_last
    }
    wanted = full.pop() if len(full) == 1 else None
    return (have, wanted) if wanted is not None and have < wanted else None


def _loaders(values: list[Any]) -> list[DataLoader[Any]]:
    """DataLoaders among the values, and those that an object among them (a trainer) holds."""
    owners = [value for value in values if not (inspect.ismodule(value) or isinstance(value, type))]
    held = [item for owner in owners for item in list((getattr(owner, "__dict__", None) or {}).values())]
    return [value for value in (*values, *held) if isinstance(value, DataLoader)]


def argument_text(argument: Argument) -> str:
    """An operand with its shape: `mask` [4, 1]."""
    sized = argument.tensor is not None or isinstance(argument.value, list)
    described = shape(argument.value) if sized else type(argument.value).__name__
    return f"`{argument.text}` {described}" if argument.text else described
