"""Which tensors of a failing operation are on which device, and optimizers whose state is elsewhere.

Only devices, shapes and names are read: a value on a device is never asked for.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.step.moved_modules import device_of_trainer
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import Argument, Call, raising_call, read
from torchmedic.source.lookup.layers import roots
from torchmedic.source.lookup.origins import user_argument
from torchmedic.source.syntax import calls_in


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the failing operation, as the user wrote it."""

    text: str
    tensor: torch.Tensor
    node: ast.expr | None = None
    frame: Frame | None = None
    holder: ast.expr | None = None  # the argument that holds the tensor, where the tensor has no expression of its own

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def shown(self) -> str:
        return f"`{self.text}`" if self.text else "another tensor"

    @property
    def words(self) -> str:
        return f"{self.shown} {list(self.tensor.shape)} is on {self.device}"


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """An operation whose tensors are on several devices. `strays` are those that are not where the model is."""

    op: str
    tensors: tuple[Placed, ...]
    strays: tuple[Placed, ...]
    layer: torch.nn.Module | None
    home: torch.device


def split_of(evidence: RaisedEvidence) -> Split | None:
    """The outermost operation, from the user's own line inwards, that was given tensors on different devices."""
    start = evidence.frames.index(evidence.user_frame) if evidence.user_frame in evidence.frames else 0
    for frame in evidence.frames[start:]:
        call = raising_call(frame)
        split = split_between(evidence, frame, call, list(_placed(evidence.frames, frame, call)))
        if split is not None:
            return split
    return None


def split_between(evidence: RaisedEvidence, frame: Frame, call: Call | None, placed: list[Placed]) -> Split | None:
    """The tensors of an operation, if they are on different devices."""
    # An operation takes a single number from the CPU along.
    devices = {each.device for each in placed if each.tensor.dim() or each.device.type != "cpu"}
    if len(devices) < 2:
        return None
    home = _home(evidence.frames, devices)
    strays = tuple(each for each in placed if each.device != home and (each.tensor.dim() or home.type == "cpu"))
    layer = frame.module if not frame.is_user else None
    op = call.op if call is not None and call.op else frame.function
    if call is not None and isinstance(call.function, torch.nn.Module):
        op = type(call.function).__name__
    return Split(op=op, tensors=tuple(placed), strays=strays, layer=layer, home=home)


def _placed(frames: list[Frame], frame: Frame, call: Call | None) -> Iterator[Placed]:
    given: list[Argument] = list(call.tensors) if call is not None else []
    if not frame.is_user:
        # The call itself may hide some of them behind expressions that cannot be read.
        given += [
            Argument(None, value, name) for name, value in frame.variables.items() if isinstance(value, torch.Tensor)
        ]
        if frame.module is not None and frame.function == "forward":
            given += [Argument(None, value, name) for name, value in _own_tensors(frame.module)]
    seen: set[int] = set()
    for argument in given:
        if argument.tensor is None or id(argument.tensor) in seen:
            continue
        seen.add(id(argument.tensor))
        passed = (frame, argument) if frame.is_user else user_argument(frames, argument.tensor)
        if passed is not None and passed[1].node is not None:
            yield Placed(text=passed[1].text, tensor=argument.tensor, node=passed[1].node, frame=passed[0])
        else:
            text = (argument.text or argument.name).removeprefix("self.")
            holder = _holder(call, argument.tensor) if call is not None and frame.is_user else None
            yield Placed(text=text, tensor=argument.tensor, frame=frame if holder is not None else None, holder=holder)


def _holder(call: Call, tensor: torch.Tensor) -> ast.expr | None:
    """The argument of a call that is a list or tuple with a tensor."""
    held = (each for each in call.arguments if isinstance(each.value, list | tuple))
    return next((each.node for each in held if any(item is tensor for item in each.value)), None)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield name, tensor


def _home(frames: list[Frame], devices: set[torch.device]) -> torch.device:
    """Where the model is, or was before its Trainer moved it away; without one, the device that is not the CPU."""
    count: Counter[torch.device] = Counter(
        device_of_trainer(root) or parameter.device for root in roots(frames) for parameter in root.parameters()
    )
    for device, _ in count.most_common():
        if device in devices:
            return device
    return next((device for device in sorted(devices, key=str) if device.type != "cpu"), next(iter(devices)))


def never_had_values(evidence: RaisedEvidence, split: Split) -> bool:
    """Whether all that is on `meta` is a model that was built there and never filled with values."""
    on_meta = [each.tensor for each in split.tensors if each.tensor.is_meta]
    held = {id(parameter) for root in roots(evidence.frames) for parameter in [*root.parameters(), *root.buffers()]}
    if not on_meta or any(id(tensor if tensor._base is None else tensor._base) not in held for tensor in on_meta):
        return False
    trees = {frame.file: frame for frame in evidence.frames if frame.is_user}
    for frame in trees.values():
        for node in calls_in(frame.tree, "to"):
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
            if any(str(read(value, frame)).startswith("meta") for value in given):
                return False
    return True


class Misplaced(NamedTuple):
    """The first tensor of the state that is on another device than its parameter."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str
    state: torch.Tensor
    affected: int  # parameters
    total: int


def misplaced_state(frames: list[Frame]) -> Misplaced | None:
    """What an optimizer, whose step is on the stack, keeps on the wrong device; counters may be on the CPU."""
    held = (frame.variables.get("self") for frame in reversed(frames))
    optimizer = next((owner for owner in held if isinstance(owner, torch.optim.Optimizer)), None)
    if optimizer is None:
        return None
    parameters = parameters_of(optimizer)
    found = [
        (parameter, key, state)
        for parameter in parameters
        for key, state in dict(optimizer.state.get(parameter, {})).items()
        if isinstance(state, torch.Tensor) and state.dim() and state.device != parameter.device
    ]
    if not found:
        return None
    affected = len({id(parameter) for parameter, _, _ in found})
    return Misplaced(optimizer, *found[0], affected, len(parameters))


def load_of(frames: list[Frame], optimizer: Any) -> tuple[str, ast.AST] | None:
    """The only call of the optimizer's `load_state_dict` in the files of the live frames."""
    found: dict[tuple[str, int], tuple[str, ast.AST]] = {}
    for frame in frames:
        for node in calls_in(frame.tree if frame.is_user else None, "load_state_dict"):
            owner = read(node.func.value, frame) if isinstance(node.func, ast.Attribute) else None
            if owner is optimizer:
                found[frame.file, node.lineno] = (frame.file, node)
    return next(iter(found.values())) if len(found) == 1 else None
