"""States that were loaded into a module in vain: no name is one of the module's, or each tensor is its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchmedic.source.spots import Place

_MAX_PREFIX = 3  # parts of a name


class Unmatched(NamedTuple):
    """`strip` and `add` are prefixes that names have too many or too few, `inside` the entry that holds a state."""

    place: Place
    module: int  # its number
    state: int  # identity of the state
    entries: int
    wanted: int
    given: str  # a name of the state
    own: str  # a name of the module
    strip: str
    add: str
    inside: str
    writes: int  # to the tensors of the module, before


def unmatched(state: Any, module: torch.nn.Module, place: Place, number: int) -> Unmatched | None:
    """What is known of a state whose names are all unknown; None where one fits, or where there is nothing to load."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not isinstance(state, Mapping) or not state or not own or not own.isdisjoint(state):
        return None
    names = [name for name in state if isinstance(name, str)]
    inside = next((name for name in names if isinstance(state[name], Mapping) and not own.isdisjoint(state[name])), "")
    strip = next((each for each in _prefixes(names) if any(name.removeprefix(each) in own for name in names)), "")
    add = next((each for each in _prefixes(own) if any(each + name in own for name in names)), "") if not strip else ""
    first, writes = names[0] if names else "", writes_of(module)
    return Unmatched(place, number, id(state), len(state), len(own), first, min(own), strip, add, inside, writes)


class OwnState(NamedTuple):
    """A state with nothing but tensors of the module that it was loaded into."""

    place: Place
    tensors: int


def own_states(state: Any, module: torch.nn.Module, place: Place) -> list[OwnState]:
    """The state, if it shares the memory of each tensor with the module itself."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not isinstance(state, Mapping) or own.keys().isdisjoint(state):
        return []
    given = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    if not all(name in own and _is_same_memory(tensor, own[name]) for name, tensor in given.items()):
        return []
    return [OwnState(place, len(given))]


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not {type(one), type(other)} <= {torch.Tensor, torch.nn.Parameter} or one.layout != torch.strided:
        return False
    return not one.is_meta and one.device == other.device and one.data_ptr() == other.data_ptr() != 0


def writes_of(module: torch.nn.Module) -> int:
    """A number for what was written to the tensors of a module, and for the tensors themselves."""
    tensors = (*module.parameters(), *module.buffers())
    return hash(tuple((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors))


def _prefixes(names: Iterable[str]) -> list[str]:
    """The first parts of the first name: `module.`, `module.encoder.`."""
    parts = min(names, default="").split(".")[:-1]
    return [".".join(parts[: at + 1]) + "." for at in range(min(len(parts), _MAX_PREFIX))]
