"""`torchmedic.predict` and `torchmedic.assert_fits`: the prediction for a function that takes a training step."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from torchmedic.errors import TorchmedicError
from torchmedic.fit.analysis import prediction_of
from torchmedic.fit.cards import chosen_card, parse_size, size_text
from torchmedic.fit.changes import Change
from torchmedic.fit.fake_device import DEVICE
from torchmedic.fit.machine import Machine
from torchmedic.fit.script import followed
from torchmedic.records.fit import Prediction
from torchmedic.replay.isolation.torch_state import same_modules

_MAX_DEPTH = 3  # levels of containers and objects that are searched for modules
_MAX_ROWS = 6  # rows of the table in the text of an assertion


def predict(
    step: Callable[[], Any], *, memory: str | int | None = None, device_name: str = "", seconds: float = 60.0
) -> Prediction:
    """Predict the device memory of a training step, on any machine, without taking the step.

    The step is played twice on tensors without memory. Models and optimizers that the function uses may live on the
    host: they are treated as if they were on the card, and are as before afterwards. The function may also build them
    itself, and may name CUDA devices.

    Args:
        step: Takes one step: forward, backward and the update of the weights.
        memory: The memory of the card, in bytes or as text (`"24GiB"`).
        device_name: A card from the table of cards, such as `"H200"`.
        seconds: The time limit.

    Raises:
        TorchmedicError: The step could not be followed.
    """
    card, limited = chosen_card(device_name, parse_size(memory) if isinstance(memory, str) else memory)

    def twice(machine: Machine) -> None:
        with _on_device(_reachable(step), machine):
            for _ in range(2):
                step()

    trace = followed(twice, card, Change(), seconds, adopt=True)
    if trace.error:
        raise TorchmedicError(f"cannot follow the step: {trace.error}")
    return prediction_of(trace, card, limited=limited)


def assert_fits(
    step: Callable[[], Any], memory: str | int | None = None, *, device_name: str = "", seconds: float = 60.0
) -> Prediction:
    """Fail a test if a training step needs more memory than a card has.

    Raises:
        AssertionError: The step does not fit; the text says what holds the memory.
        TorchmedicError: The step could not be followed.
    """
    if memory is None and not device_name:
        raise TypeError("assert_fits needs the memory of a card, or its name")
    found = predict(step, memory=memory, device_name=device_name, seconds=seconds)
    if not found.fits:
        rows = sorted(found.rows, key=lambda row: -row.nbytes)[:_MAX_ROWS]
        held = "".join(f"\n  {size_text(row.nbytes):>12}  {row.kind} {_at(row.line)}" for row in rows)
        assert found.memory is not None
        raise AssertionError(
            f"the step needs {size_text(found.need.total)}, the card has {size_text(found.memory)}; "
            f"the peak is in {found.phase} {_at(found.line)}{held}"
        )
    return found


def _at(line: Any) -> str:
    return f"at {line.file}:{line.line}" if line.file else ""


def _reachable(step: Any) -> list[Any]:
    """Modules and optimizers that a function uses: of its closure, its defaults, its globals and its object."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if id(value) in seen or depth < 0:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            found[id(value)] = value
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                look(each, depth)
        elif hasattr(value, "__code__") or hasattr(value, "__func__"):
            look_into(value, depth)
        elif isinstance(value, dict):
            for each in value.values():
                look(each, depth - 1)
        elif isinstance(value, list | tuple | set):
            for each in value:
                look(each, depth - 1)
        elif type(value).__module__ != "builtins":
            look(getattr(value, "__dict__", None), depth - 1)

    def look_into(function: Any, depth: int) -> None:
        if (owner := getattr(function, "__self__", None)) is not None:
            look(owner, depth)
        code = getattr(function, "__code__", None)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                look(cell.cell_contents, depth)
        look(getattr(function, "__defaults__", None), depth)
        names = _global_names(code) if code is not None else set()
        for name, value in getattr(function, "__globals__", {}).items():
            if name in names:
                look(value, depth - 1)

    look(step, _MAX_DEPTH)
    return list(found.values())


def _global_names(code: CodeType) -> set[str]:
    """Names that code reads from its module, with those of functions inside it."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _global_names(inner)
    return found


@contextlib.contextmanager
def _on_device(objects: list[Any], machine: Machine) -> Iterator[None]:
    """Modules and optimizers hold fake tensors of the device until the end of the block."""
    fakes: dict[int, torch.Tensor] = {}
    modules = {id(each): each for root in objects if isinstance(root, torch.nn.Module) for each in root.modules()}
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]

    def fake(tensor: torch.Tensor, kind: Any) -> torch.Tensor:
        made = fakes.get(id(tensor))
        if made is None:
            made = machine.fake_like(tensor.detach(), DEVICE)
            machine.recorder.born(made, kind, machine.caller(), machine.caller())
            if kind == "parameters":
                made = torch.nn.Parameter(made, tensor.requires_grad)
            fakes[id(tensor)] = made
        return made

    groups = [(group, group["params"]) for each in optimizers for group in each.param_groups]
    states = [(each, each.state) for each in optimizers]
    with same_modules(modules.values()):
        try:
            for module in modules.values():
                for name, kind in (("_parameters", "parameters"), ("_buffers", "buffers")):
                    table = module.__dict__[name]
                    table.update({key: fake(each, kind) for key, each in table.items() if each is not None})
                if isinstance(module, torch.nn.RNNBase):
                    module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
            for group, params in groups:
                group["params"] = [fake(each, "parameters") for each in params]
            for each in optimizers:
                each.state = type(each.state)(dict)
            yield
        finally:
            for group, params in groups:
                group["params"] = params
            for each, state in states:
                each.state = state
