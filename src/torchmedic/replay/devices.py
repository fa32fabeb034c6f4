"""Which tensors of a failing operation are on which device, and why one of them was left behind.

Only devices, shapes and names are read: a value on a device is never asked for.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.records import Location
from torchmedic.replay.bindings import own_statements
from torchmedic.replay.calls import Argument, Call, raising_call, read
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame, node_location
from torchmedic.replay.layers import roots
from torchmedic.replay.origins import attribute_assignments, function_body, origin_of, user_argument

_FACTORIES = frozenset(
    "tensor as_tensor from_numpy zeros ones empty full eye arange linspace logspace rand randn randint randperm normal "
    "scalar_tensor tril_indices triu_indices".split()
)
_MOVES = frozenset({"to", "cuda", "cpu"})


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the failing operation, as the user wrote it."""

    text: str
    tensor: torch.Tensor
    node: ast.expr | None = None
    frame: Frame | None = None

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def words(self) -> str:
        return f"`{self.text}` {list(self.tensor.shape)} is on {self.device}"


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
        placed = list(_placed(evidence.frames, frame, call))
        # An operation takes a single number from the CPU along.
        devices = {each.device for each in placed if each.tensor.dim() or each.device.type != "cpu"}
        if len(devices) < 2:
            continue
        home = _home(evidence.frames, devices)
        strays = tuple(each for each in placed if each.device != home and (each.tensor.dim() or home.type == "cpu"))
        layer = frame.module if not frame.is_user else None
        op = call.op if call is not None and call.op else frame.function
        if call is not None and isinstance(call.function, torch.nn.Module):
            op = type(call.function).__name__
        return Split(op=op, tensors=tuple(placed), strays=strays, layer=layer, home=home)
    return None


def _placed(frames: list[Frame], frame: Frame, call: Call | None) -> Iterator[Placed]:
    given: list[Argument] = list(call.tensors) if call is not None else []
    if not frame.is_user:
        # The call itself may hide some of them behind expressions that cannot be read.
        given += [Argument(None, value, name) for name, value in frame.variables.items() if _is_tensor(value)]
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
            yield Placed(text=(argument.text or argument.name).removeprefix("self."), tensor=argument.tensor)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield name, tensor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _home(frames: list[Frame], devices: set[torch.device]) -> torch.device:
    """Where the model is; without one, the device that is not the CPU."""
    count: Counter[torch.device] = Counter(
        parameter.device for root in roots(frames) for parameter in root.parameters()
    )
    for device, _ in count.most_common():
        if device in devices:
            return device
    return next((device for device in sorted(devices, key=str) if device.type != "cpu"), next(iter(devices)))


def never_had_values(evidence: RaisedEvidence, split: Split) -> bool:
    """Whether the only thing on `meta` is a model that was built there: not moved, only never filled with values."""
    on_meta = [each.tensor for each in split.tensors if each.tensor.is_meta]
    held = {id(parameter) for root in roots(evidence.frames) for parameter in [*root.parameters(), *root.buffers()]}
    if not on_meta or any(id(tensor) not in held for tensor in on_meta):
        return False
    trees = {frame.file: frame for frame in evidence.frames if frame.is_user}
    for frame in trees.values():
        for node in ast.walk(frame.tree) if frame.tree is not None else ():
            if isinstance(node, ast.Call) and _called(node) == "to":
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
                if any(str(read(value, frame)).startswith("meta") for value in given):
                    return False
    return True


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a tensor is not where the others are."""

    fact: str
    advice: str
    place: Location | None = None


def reason_of(evidence: RaisedEvidence, split: Split) -> Reason | None:
    """The first explanation that the user's own code bears out."""
    state = _optimizer_state(evidence, split)
    if state is not None:
        return state
    for stray in split.strays:
        for explain in (_plain_attribute, _unregistered_layer, _lost_move, _made_without_device, _not_moved):
            found = explain(evidence, split, stray)
            if found is not None:
                return found
    return None


def _optimizer_state(evidence: RaisedEvidence, split: Split) -> Reason | None:
    """What an optimizer keeps of earlier steps stays where the parameters were then."""
    if not any(str(frame.live.f_globals.get("__name__", "")).startswith("torch.optim.") for frame in evidence.frames):
        return None
    return Reason(
        fact=f"the optimizer's state is on {split.strays[0].device}, its parameters have moved to {split.home} since",
        advice="move the model before the first step, or load the optimizer's state again after the move",
    )


def _parts(stray: Placed) -> list[torch.Tensor]:
    """The tensor itself, and those on the same device that its expression is made of: `self.mask` in `~self.mask`."""
    found = [stray.tensor]
    if stray.node is not None and stray.frame is not None:
        for node in ast.walk(stray.node):
            value = read(node, stray.frame) if isinstance(node, ast.Name | ast.Attribute) else None
            if isinstance(value, torch.Tensor) and value.device == stray.device:
                found.append(value)
    return found


def _plain_attribute(evidence: RaisedEvidence, split: Split, stray: Placed) -> Reason | None:
    """`self.mask = torch.ones(...)` in a module: `.to()` moves only parameters and buffers."""
    parts = _parts(stray)
    for root in roots(evidence.frames):
        for module in root.modules():
            for name, value in module.__dict__.items():
                if not any(value is part for part in parts):
                    continue
                made = list(attribute_assignments(type(module), name))
                place = (
                    node_location("origin", *made[0], "a plain attribute, which `.to()` does not move")
                    if made
                    else None
                )
                owner = type(module).__name__
                return Reason(
                    fact=f"`{owner}.{name}` is a plain attribute: `.to()` moves only parameters and buffers",
                    advice=f'register it: `self.register_buffer("{name}", ...)`',
                    place=place,
                )
    return None


def _unregistered_layer(evidence: RaisedEvidence, split: Split, stray: Placed) -> Reason | None:
    """A layer in a Python list or dict of a module, which the module does not know of."""
    for root in roots(evidence.frames):
        for module in root.modules():
            for name, value in module.__dict__.items():
                inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
                if name.startswith("_") or not any(
                    isinstance(layer, torch.nn.Module) and any(held is stray.tensor for held in layer.parameters())
                    for layer in inside
                ):
                    continue
                made = list(attribute_assignments(type(module), name))
                kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                label = "the model does not know of layers in a plain container"
                owner = type(module).__name__
                return Reason(
                    fact=f"`{owner}.{name}` is a plain {type(value).__name__}, so its layers are not moved",
                    advice=f"hold the layers in an `nn.{kind}`; an optimizer does not see them otherwise either",
                    place=node_location("origin", *made[0], label) if made else None,
                )
    return None


def _lost_move(evidence: RaisedEvidence, split: Split, stray: Placed) -> Reason | None:
    """`x.to(device)` as a statement of its own: a tensor is not moved in place."""
    for frame in reversed(evidence.frames):
        body = function_body(frame) if frame.is_user else None
        for statement in own_statements(body) if body is not None else ():
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=attr))) if attr in _MOVES:
                    held = frame.variables.get(owner.id) if isinstance(owner, ast.Name) else None
                    if any(held is part for part in _parts(stray)) and statement.lineno < frame.line:
                        text = ast.unparse(statement)
                        return Reason(
                            fact=f"`{text}` moves nothing: for a tensor it returns a copy, which is dropped",
                            advice=f"keep the result: `{ast.unparse(owner)} = {text}`",
                            place=node_location("origin", frame.file, statement, "the moved copy is dropped here"),
                        )
    return None


def _made_without_device(evidence: RaisedEvidence, split: Split, stray: Placed) -> Reason | None:
    """`torch.zeros(...)` with no `device=` makes a tensor on the CPU."""
    if stray.node is None or stray.frame is None or stray.device.type != "cpu":
        return None
    origin = origin_of(evidence.frames, stray.frame, stray.node)
    if origin is not None and isinstance(origin.node, ast.expr) and origin.name != ast.unparse(origin.node):
        return None  # a loop header, which names where the values come from and not this one
    made = origin.value if origin is not None and origin.value is not None else stray.node
    calls = [(part, _called(part)) for part in ast.walk(made) if isinstance(part, ast.Call)]
    if any(name in _MOVES for _, name in calls):
        return None
    for call, name in calls:
        given = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if name in _FACTORIES and not given:
            file = origin.file if origin is not None else stray.frame.file
            return Reason(
                fact=f"`{name}` without `device=` makes its tensor on {stray.device}",
                advice=f"pass `device=` to `{name}`, for example that of the tensor it is used with",
                place=node_location("origin", file, call, f"made on {stray.device}"),
            )
    return None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else str(getattr(call.func, "id", ""))


def _not_moved(evidence: RaisedEvidence, split: Split, stray: Placed) -> Reason | None:
    """The model and its input were not brought to the same device."""
    origin = None
    if stray.node is not None and stray.frame is not None:
        origin = origin_of(evidence.frames, stray.frame, stray.node)
    if split.home.type == "cpu":
        place = origin.location("origin", f"`{origin.name}` is made on {stray.device} here") if origin else None
        return Reason(
            fact=f"the model's parameters are on cpu, what it was given is on {stray.device}",
            advice=f"move the model first: `model.to({str(stray.device)!r})`",
            place=place,
        )
    from_batch = any(member is stray.tensor for member in evidence.incident.batch)
    if not from_batch and origin is None:
        return None
    return Reason(
        fact=f"`{stray.text}` comes from the DataLoader, which yields batches on {stray.device}"
        if from_batch
        else f"`{stray.text}` was never moved to {split.home}",
        advice=f"move it before it is used: `{stray.text}.to({str(split.home)!r})`",
        place=origin.location("origin", f"`{origin.name}` comes from here") if origin is not None else None,
    )
