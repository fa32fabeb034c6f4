"""Where a tensor of the wrong device or dtype was made: the failing step run once more, every new tensor noted.

Syntax shows only the last assignment. The replay also sees what a helper, another file or a method made, and which
expressions for the right device were at hand there.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchmedic.evidence.devices.placement import split_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.operations import dense, storage_of
from torchmedic.source.spots import spot_of_frame
from torchmedic.source.user_code import user_frame

Trait = Literal["device", "dtype"]  # of a tensor, which is wrong
Words = tuple[tuple[str, torch.device], ...]  # expressions for devices, in the order in which they are good names


class Given(NamedTuple):
    """A storage that an operation was given."""

    key: int
    device: torch.device
    dtype: torch.dtype


class Made(NamedTuple):
    """An operation that made a tensor."""

    op: str
    spot: Spot | None
    inputs: tuple[Given, ...]
    words: Words  # where nothing was put in


class Birth(NamedTuple):
    """Where a stray comes from: an operation of this step, or a tensor that was there before it."""

    made: Made | None
    leaf: torch.Tensor | None = None
    moved: bool = False  # taken from another device or dtype by that operation
    met: Made | None = None  # the first operation that put that tensor together with one of another device or dtype


class Trace(TorchDispatchMode):
    """Notes what each operation of a replay made, and what the operation was given that failed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.failed: tuple[torch.Tensor, ...] = ()
        self._made: dict[int, Made] = {}
        self._given: dict[int, torch.Tensor] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._copies: list[tuple[Made, torch.device]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        inputs = []
        for tensor in given:
            key = storage_of(tensor)
            if key is not None:
                inputs.append(Given(key, tensor.device, tensor.dtype))
                if key not in self._made and not func._schema.name.startswith("aten::lift"):
                    self._given.setdefault(key, tensor)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = tuple(given)
            raise
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("lift"):
            inputs = []  # `torch.tensor` shows what it has made to the modes that look on
        known = {each.key for each in inputs}
        for tensor in tree_iter(result):
            key = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if key is None or key in known or key in self._alive:
                continue
            self._alive[key] = StorageWeakRef(dense(tensor).untyped_storage())  # its address is not given out again
            user = user_frame(sys._getframe(1))
            spot = spot_of_frame(user) if user is not None else None
            words = device_words(user) if user is not None and not inputs else ()
            made = self._made[key] = Made(name, spot, tuple(inputs), words)
            if made.op == "_to_copy":
                self._copies.append((made, tensor.device))
        return result

    def births_of(self, tensor: torch.Tensor, trait: Trait = "device") -> list[Birth]:
        """Where the inputs of the failing operation that share a trait with a tensor got it, the nearest first."""
        wrong = getattr(tensor, trait)
        given = [other for other in self.failed if getattr(other, trait) == wrong and (other.dim() or not tensor.dim())]
        keys = [key for each in given if (key := storage_of(each)) is not None]
        found: list[Birth] = []
        seen = set(keys)
        met: dict[int, Made] = {}
        while keys:
            at = keys.pop(0)
            made = self._made.get(at)
            if made is None:
                found.append(Birth(None, self._given.get(at, tensor), met=met.get(at)))
                continue
            same = [each.key for each in made.inputs if getattr(each, trait) == wrong]
            mixed = any(getattr(each, trait) != wrong and each.dtype.is_floating_point for each in made.inputs)
            nearest = made if mixed else met.get(at)
            met |= {key: nearest for key in same if nearest is not None and key not in seen}
            if not same:
                found.append(Birth(made, moved=bool(made.inputs)))
            keys += [key for key in same if key not in seen]
            seen.update(same)
        return found

    def copies_of(self, tensors: list[torch.Tensor], device: torch.device) -> list[Spot]:
        """Where tensors, or what the failing operation was given on their device, were copied to another device."""
        wanted = {storage_of(tensor) for tensor in (*tensors, *self.failed) if tensor.device == device}
        return [
            made.spot
            for made, result in self._copies
            if made.spot is not None and result != device and any(each.key in wanted for each in made.inputs)
        ]


def replayed(step: Step, evidence: RaisedEvidence) -> Trace | None:
    """The step run again to the same failure, with all births noted; None where it does not fail as it did before."""
    trace = Trace()
    try:
        error = step.runner.play(trace).error
    except RuntimeError:
        return None  # what lies on `meta` cannot be put back
    if error is None or type(error) is not type(evidence.error) or str(error) != str(evidence.error):
        return None
    if not trace.failed:
        # Torch looked at devices and dtypes before it called any operation.
        again = RaisedEvidence(evidence.incident.with_error(error))
        split, call = split_of(again), again.call
        given = call.tensors if call is not None else []
        trace.failed = tuple(each.tensor for each in split.tensors) if split else tuple(each.value for each in given)
    return trace


def device_words(frame: FrameType) -> Words:
    """The expressions by which a function can name a device: a variable, a tensor's device, its module's device."""
    local = dict(frame.f_locals)
    found: list[tuple[str, torch.device]] = []
    for name, value in local.items():
        if _device(value) is not None and name.isidentifier():
            found.append((name, _device(value)))  # type: ignore[arg-type]
    owner = local.get("self")
    if owner is not None and _device(getattr(owner, "__dict__", {}).get("device")) is not None:
        found.append(("self.device", torch.device(owner.__dict__["device"])))
    for name, value in local.items():
        if isinstance(value, torch.Tensor) and name.isidentifier():
            found.append((f"{name}.device", value.device))
    if isinstance(owner, torch.nn.Module):
        path = next(((path, held.device) for path, held in owner.named_parameters()), None)
        if path is not None:
            plain = all(part.isidentifier() for part in path[0].split("."))
            text = f"self.{path[0]}.device" if plain else "next(self.parameters()).device"
            found.append((text, path[1]))
    for name, value in list(frame.f_globals.items()):
        if isinstance(value, torch.device) or (name.lower() == "device" and _device(value) is not None):
            found.append((name, torch.device(value)))
    for name, value in [*local.items(), *frame.f_globals.items()]:
        first = next(value.parameters(), None) if isinstance(value, torch.nn.Module) and name != "self" else None
        if first is not None:
            found.append((f"next({name}.parameters()).device", first.device))
    return tuple(found)


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda", "meta", "mps", "xpu"):
        try:
            return torch.device(value)
        except RuntimeError:
            return None
    return None


def word_for(device: torch.device, words: Words) -> str | None:
    """The first expression that names a device."""
    return next((text for text, each in words if same_device(each, device)), None)


def same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)
