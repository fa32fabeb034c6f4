"""Save the weights of a process that hangs, where they are known to be whole.

They are if no update is under way, the device has nothing left to do, and the thread that trains does not move: then
nobody can write to them while they are read.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch

from torchmedic.observe.context import ProcessContext
from torchmedic.observe.inside import device
from torchmedic.observe.inside.other_threads import OTHERS
from torchmedic.observe.step.clock import OPTIMIZER
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records.stall import Saved
from torchmedic.runfolder.confidential import is_confidential, run_of
from torchmedic.runfolder.files import write_atomically
from torchmedic.source.objects.living import live_modules


def saved(agent: ProcessContext) -> Saved:
    pid = os.getpid()
    refusal = _refusal(agent)
    if refusal:
        return Saved(pid=pid, refused=refusal)
    models = _models(agent)
    path = run_of(agent.run) / f"checkpoint-{pid}-step{agent.clock.step}.pt"
    try:
        _write(path, models, agent)
    except Exception as error:
        why = "" if is_confidential(agent.run) else f": {error}"
        return Saved(pid=pid, refused=f"it could not be written: {type(error).__name__}{why}")
    return Saved(pid=pid, path=str(path))


def _refusal(agent: ProcessContext) -> str:
    """Why it cannot be known that the weights are whole; empty if they are."""
    if agent.clock.phase == OPTIMIZER:
        return "an update of the weights is under way"
    if device.state().get("device_busy"):
        return "the device is still at work"
    if not agent.clock.optimizers:
        return "nothing is being trained yet"
    frame = OTHERS.main_frame()
    while frame is not None:
        if frame.f_code.co_filename.endswith(os.path.join("torch", "optim", "optimizer.py")):
            return "an update of the weights is under way"
        frame = frame.f_back
    return ""


def _write(path: Path, models: list[torch.nn.Module], agent: ProcessContext) -> None:
    buffer = io.BytesIO()
    state = {
        "step": agent.clock.step,
        "models": {f"{index}:{type(module).__name__}": module.state_dict() for index, module in enumerate(models)},
        "optimizers": [optimizer.state_dict() for optimizer in agent.clock.optimizers],
    }
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def _models(agent: ProcessContext) -> list[torch.nn.Module]:
    """The outermost modules that hold what the optimizers train."""
    trained = set(map(id, parameters_of(*agent.clock.optimizers)))
    found = [each for each in live_modules() if any(id(parameter) in trained for parameter in each.parameters())]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]
