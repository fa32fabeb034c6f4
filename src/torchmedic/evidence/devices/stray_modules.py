"""Why a tensor of a module stayed behind: the module does not know of it, or was not moved itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.evidence.devices.strays import DEPTH, Reason, Stray, items_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.bindings import function_body
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.layer_construction import class_node
from torchmedic.source.lookup.layers import layer_built_at, roots
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.syntax import FUNCTIONS, nodes_in


def attribute(stray: Stray) -> Reason | None:
    """A tensor that a module holds as a plain attribute: `.to()` moves only parameters and buffers."""
    for module in _modules(stray.evidence):
        for name, value in list(module.__dict__.items()):
            if name in _OF_TORCH or not stray.is_in(value):
                continue
            made = list(attribute_assignments(type(module), name))
            owner, direct = type(module).__name__, isinstance(value, torch.Tensor)
            what = "attribute" if direct else type(value).__name__
            label = f"a plain {what}, which `.to()` does not move"
            return Reason(
                kind="attribute" if direct else "container",
                fact=f"`{owner}.{name}` is a plain {what}: `.to()` moves only parameters and buffers",
                advice=f'register it: `self.register_buffer("{name}", ...)`'
                if direct
                else f"register the tensors in `{name}` one by one with `self.register_buffer`",
                place=node_location("cause", *made[0], label) if made else None,
                file=made[0][0] if made else "",
                nodes=(made[0][1],) if len(made) == 1 else (),
                owner=module,
                name=name,
            )
    return None


def of_the_class(stray: Stray) -> Reason | None:
    """A tensor in the body of the class, which all its modules share and none moves."""
    for module in _modules(stray.evidence):
        for kind in type(module).__mro__:
            name = next((name for name, value in vars(kind).items() if stray.is_in(value, 0)), None)
            found = class_node(kind) if name is not None else None
            for statement in found[1].body if found is not None else ():
                if found is not None and isinstance(statement, ast.Assign) and name in _targets(statement):
                    return Reason(
                        kind="variable",
                        fact=f"`{kind.__name__}.{name}` belongs to the class: `.to()` moves what is registered",
                        advice=f'register it in `__init__`: `self.register_buffer("{name}", ...)`',
                        place=node_location(
                            "cause", found[0], statement, "a tensor of the class, which is never moved"
                        ),
                    )
    return None


def _targets(statement: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in statement.targets]


_OF_TORCH = frozenset(
    "_parameters _buffers _modules _flat_weights _flat_weight_refs _forward_hooks _backward_hooks".split()
)


def _modules(evidence: RaisedEvidence) -> Iterator[torch.nn.Module]:
    seen: set[int] = set()
    for root in roots(evidence.frames):
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def unregistered_layer(stray: Stray) -> Reason | None:
    """A layer in a Python list, dict or plain object of a module, which the module does not know of."""
    for module in _modules(stray.evidence):
        for name, value in list(module.__dict__.items()):
            layer = None if name.startswith("_") else _layer_in(value, stray)
            if layer is None:
                continue
            made = list(attribute_assignments(type(module), name))
            kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
            return Reason(
                kind="layers",
                fact=f"`{type(module).__name__}.{name}` is a plain {type(value).__name__}, so its layers are not moved",
                advice=f"hold the layers in an `nn.{kind}`; an optimizer does not see them otherwise either",
                place=node_location("cause", *made[0], "the model does not know of layers in a plain container")
                if made
                else None,
                file=made[0][0] if made else "",
                nodes=(made[0][1],) if len(made) == 1 else (),
                owner=module,
                name=name,
            )
    return None


def _layer_in(value: Any, stray: Stray, depth: int = DEPTH) -> torch.nn.Module | None:
    if isinstance(value, torch.nn.Module):
        return value if depth < DEPTH and _has(value, stray) else None
    items = items_of(value) if depth and not isinstance(value, torch.Tensor) else []
    return next((found for item in items if (found := _layer_in(item, stray, depth - 1)) is not None), None)


def _has(module: torch.nn.Module, stray: Stray) -> bool:
    return any(held is tensor for held in [*module.parameters(), *module.buffers()] for tensor in stray.tensors)


def late_module(stray: Stray) -> Reason | None:
    """A layer that is registered, but is not where the rest of its model is: it was put in after the move."""
    for root in roots(stray.evidence.frames):
        layer = next((module for module in root.modules() if _owns(module, stray)), None)
        if layer is None or layer is root:
            continue
        path = next(path for path, module in root.named_modules() if module is layer)
        devices = {held.device for held in root.parameters() if not any(held is own for own in layer.parameters())}
        if devices != {stray.split.home} or stray.device in devices:
            continue
        put = _put_in(stray.evidence, path)
        return Reason(
            kind="module",
            fact=f"`{path}` is on {stray.device}, all else of `{type(root).__name__}` on {stray.split.home}: "
            "it was put in after the model was moved",
            advice=f"move the model after `{path}` is put in",
            place=node_location("cause", *put, f"put in on {stray.device}, after the move") if put else None,
            file=put[0] if put else "",
            module=layer,
        )
    return None


def _owns(module: torch.nn.Module, stray: Stray) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(held is tensor for held in own if held is not None for tensor in stray.tensors)


def _put_in(evidence: RaisedEvidence, path: str) -> tuple[str, ast.AST] | None:
    """The only statement of the user's, outside of the model's own class, that assigns `model.head` or `model[2]`."""
    last = path.rpartition(".")[2]
    found: dict[tuple[str, int], tuple[str, ast.AST]] = {}
    for frame in evidence.frames:
        for node in nodes_in(frame.tree if frame.is_user else None):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                match target:
                    case ast.Attribute(value=owner, attr=attr) if attr == last and ast.unparse(owner) != "self":
                        found[frame.file, node.lineno] = (frame.file, node)
                    case ast.Subscript(value=owner, slice=index) if _names(index, last) and not _is_word(owner):
                        found[frame.file, node.lineno] = (frame.file, node)
    return next(iter(found.values())) if len(found) == 1 else None


def _names(index: ast.expr, last: str) -> bool:
    if isinstance(index, ast.UnaryOp):
        return isinstance(index.op, ast.USub) and last.isdigit()
    return isinstance(index, ast.Constant) and str(index.value) == last


def _is_word(node: ast.expr) -> bool:
    return not isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def other_module(stray: Stray) -> Reason | None:
    """A second model, or a loss with weights, that was never moved; or the model itself."""
    evidence, split = stray.evidence, stray.split
    for frame in reversed(evidence.frames):
        for name, value in _named_modules(frame) if frame.is_user else ():
            devices = {held.device for held in [*value.parameters(), *value.buffers()]}
            if not _has(value, stray) or devices != {stray.device}:
                continue
            place = layer_built_at(evidence.frames, value, f"made on {stray.device}, and never moved")
            return Reason(
                kind="module",
                fact=f"all that `{name}` (`{type(value).__name__}`) holds is on {stray.device}: it was never moved",
                advice=f"move it as well: `{name}.to({str(split.home)!r})`",
                place=msgspec.structs.replace(place, role="cause") if place is not None else None,
                module=value,
                name=name,
            )
    return None


def _named_modules(frame: Frame) -> Iterator[tuple[str, torch.nn.Module]]:
    owner = frame.variables.get("self")
    held = getattr(owner, "__dict__", {}) if not isinstance(owner, torch.nn.Module) else {}
    for name, value in [
        *((name, value) for name, value in frame.variables.items() if name != "self"),
        *((f"self.{name}", value) for name, value in held.items()),
        *frame.live.f_globals.items(),
    ]:
        if isinstance(value, torch.nn.Module):
            yield name, value


def _is_in(frame: Frame, spot: Spot) -> bool:
    """Whether a line belongs to the function of a frame. A replay runs it outside of the function."""
    body = function_body(frame) if spot.file == frame.file else None
    return isinstance(body, FUNCTIONS) and body.lineno <= spot.line <= (body.end_lineno or body.lineno)


def model_left_behind(stray: Stray) -> Reason | None:
    """The batch was brought to a device, the model was not."""
    models = [root for root in roots(stray.evidence.frames) if any(True for _ in root.parameters())]
    if stray.split.home.type != "cpu" or not models or attribute(stray) is not None:
        return None
    inside = [frame for frame in stray.evidence.frames if frame.module is not None]
    spots = [birth.made.spot for birth in stray.births if birth.made is not None and birth.made.spot is not None]
    if not inside or any(_is_in(frame, spot) for frame in inside for spot in spots):
        return None  # no module was called, or the model made it
    origin = stray.origin
    return Reason(
        kind="module",
        fact=f"the model's parameters are on cpu, what it was given is on {stray.device}",
        advice=f"move the model first: `model.to({str(stray.device)!r})`",
        place=origin.location("origin", f"`{origin.name}` is made on {stray.device} here") if origin else None,
        module=models[-1],
    )
