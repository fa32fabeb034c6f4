"""The optimizer state, which is created at the first step, does not fit.

What: forward and backward passed, and the first `optimizer.step()` ran out of memory while it created its state.

Why: Adam keeps two numbers per parameter, in the dtype of the parameter, and creates them at its first step. A first
forward and backward that just fit do not include this state, and at the time of the step all gradients and the last
batch are still in memory.

Cure: use an optimizer with less state (SGD, Adafactor, 8-bit Adam), or distribute its state over several devices. A
smaller batch helps only if activations and results of the step hold what the state needs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import noticed, shown
from torchmedic.diagnose.rules.memory.collected_tensors import is_collecting
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.book import HEADINGS
from torchmedic.evidence.memory.accounting.storages import total
from torchmedic.evidence.memory.attempts import history_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.observe.step.tensors import parameters_of, tensors_in
from torchmedic.source.live_frames import Frame

_MIN_TIMES_STATE = 4
_GROWS_WITH_BATCH = ("the batch", "saved activations", "held", "not traced")
# Copies of each parameter that an optimizer keeps, by its class.
_COPIES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "RMSprop": 1,
    "Adagrad": 1,
    "Rprop": 2,
}


@rule("TM408", "first-optimizer-state")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None:
        return None
    optimizer = _stepping(evidence)
    if not autopsy.in_optimizer and not (isinstance(optimizer, torch.optim.LBFGS) and _is_most(autopsy)):
        return None
    needed = _needed(optimizer) if optimizer is not None else 0
    there = _there(optimizer, evidence) if optimizer is not None else 0
    first = optimizer is not None and (_is_first(optimizer) or (_is_own(optimizer) and _no_update(autopsy)))
    if optimizer is None or not needed or (there >= needed and not first) or (_is_own(optimizer) and not first):
        return None  # it has stepped before: what is missing is memory for the step itself
    top = next(iter(autopsy.holders()), None)
    if top is not None and top[1] > _MIN_TIMES_STATE * needed and is_collecting(autopsy):
        return None  # results of many trainings, say: it is only the last straw
    kind = type(optimizer).__name__
    draft = check.draft(evidence, "proven")
    draft.message = f"the state of {kind} needs {size(needed)}" + (
        f", of which {size(there)} fitted" if there < needed else f", and its step {size(autopsy.asked or 0)} more"
    )
    draft.cause = _reason(optimizer)
    step = _caller(evidence)
    if step is None or (autopsy.in_optimizer and not _is_own(optimizer)):
        draft.at(*evidence.at_user_line("cause", "the state is made here"))
    else:
        draft.at(step.location("cause", "the state is made here"), *noticed(autopsy))
    shown(draft, autopsy)
    return draft.help(_advice(kind, autopsy, needed - there))


def _reason(optimizer: Any) -> str:
    if isinstance(optimizer, torch.optim.LBFGS):
        kept = optimizer.param_groups[0]["history_size"]
        return f"it keeps two vectors as long as all parameters for each of the last {kept} iterations (`history_size`)"
    return "it is made at the first step of the optimizer, when all gradients are there"


def _stepping(evidence: RaisedEvidence) -> Any:
    for frame in reversed(evidence.frames):
        owner = frame.variables.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return owner
    return None


def _is_most(autopsy: Autopsy) -> bool:
    """Whether no heading has more than the state of optimizers. LBFGS calls the model while it makes its own."""
    state = autopsy.book.total("optimizer state")
    return state > 0 and all(state >= autopsy.book.total(heading) for heading in HEADINGS)


def _caller(evidence: RaisedEvidence) -> Frame | None:
    """The frame of the user's that has called the step of the optimizer."""
    found = None
    for frame in evidence.frames:
        if isinstance(frame.variables.get("self"), torch.optim.Optimizer) and not frame.is_user:
            return found
        found = frame if frame.is_user else found
    return None


def _trained(optimizer: Any) -> list[torch.Tensor]:
    every = parameters_of(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return every  # its vectors are as long as all of them, and in the closure gradients come and go
    return [each for each in every if each.grad is not None]


def _needed(optimizer: Any) -> int:
    options = optimizer.param_groups[0] if optimizer.param_groups else {}
    if _is_own(optimizer):
        return _projected(optimizer)
    copies = next((_COPIES[each.__name__] for each in type(optimizer).__mro__ if each.__name__ in _COPIES), 0)
    if type(optimizer).__name__ in ("SGD", "RMSprop"):
        copies += bool(options.get("momentum"))
    if isinstance(optimizer, torch.optim.LBFGS):
        copies = 2 * int(options["history_size"])
    copies += bool(options.get("amsgrad")) + bool(options.get("centered"))
    return copies * sum(each.nbytes for each in _trained(optimizer))


def _is_own(optimizer: Any) -> bool:
    """Whether the optimizer is a class of the user's or of a library, with a step of its own."""
    step = inspect.unwrap(type(optimizer).step)
    return not str(getattr(step, "__module__", "")).startswith("torch.")


def _no_update(autopsy: Autopsy) -> bool:
    return autopsy.agent is not None and autopsy.agent.clock.updates == 0


def _projected(optimizer: Any) -> int:
    """Bytes that the state will take, by the parameters that have a state by now."""
    states = [
        (each.nbytes, total(tensors_in(list(optimizer.state.get(each, {}).values())))) for each in _trained(optimizer)
    ]
    made = [(nbytes, state) for nbytes, state in states if state > nbytes // 2]
    times = max((state / nbytes for nbytes, state in made), default=0.0)
    return int(times * sum(nbytes for nbytes, _ in states))


def _there(optimizer: Any, evidence: RaisedEvidence) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*tensors_in(values), *history_of(evidence.frames)]
    return total(value for value in kept if value.numel() > 1)


def _is_first(optimizer: Any) -> bool:
    """Whether no step of it has ended: the counters that it keeps on the host stand at one at most."""
    counts: list[Any] = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    on_host = [each for each in counts if isinstance(each, int | float) or getattr(each, "is_cpu", False)]
    return bool(counts) and len(on_host) == len(counts) and all(float(each) <= 1 for each in on_host)


def _advice(kind: str, autopsy: Autopsy, missing: int) -> str:
    if kind == "LBFGS":
        return "keep fewer of them (`history_size=10`), or use an optimizer with less state"
    other = "SGD or an 8-bit Adam" if kind.startswith(("Adam", "NAdam", "RAdam")) else "one with less state"
    advice = f"use another optimizer ({other}), or shard its state over several devices"
    of_batch = sum(autopsy.book.total(heading) for heading in _GROWS_WITH_BATCH)
    return (
        f"use a smaller batch, or {advice[4:]}" if of_batch >= missing else f"{advice}: a smaller batch is not enough"
    )
