"""The graphs of earlier steps are still held, and fill the memory.

What: a tensor that is kept from an earlier step keeps its autograd graph, and the graph keeps every activation that it
has saved. Step by step they add up until nothing is left.

Why: `losses.append(loss)`, `total += loss`, outputs or hidden states that are carried on, a replay buffer filled with
results of the model, a hook that collects, a closure, an exception that is kept, gradients of
`backward(create_graph=True)`.

Cure: keep a number (`loss.item()`), or a tensor that is cut off from its graph (`.detach()`); run what needs no
gradients under `torch.no_grad()`.
"""

from __future__ import annotations

import ast
from collections import deque
from typing import Any

import torch

from torchmedic.diagnose.describe import count
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, table
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import syntax_tree
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.memory.bound_for_backward import is_differentiated_later
from torchmedic.replay.memory.fillers import Filler, assigned_at, fillers_of
from torchmedic.replay.memory.retained import Retained

CODE, NAME = "TM403", "retained-graph"

_SHARE = 0.25  # of all tensors
_CONTAINERS = (list, tuple, set, deque, dict)


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    wanted = (each.of_this_step and not each.for_nothing and _is_for_backward(each) for each in autopsy.retained)
    held = next((each for each, is_wanted in zip(autopsy.retained, wanted, strict=True) if not is_wanted), None)
    if held is None or held.only_nodes or held.nbytes < _SHARE * max(autopsy.book.everything, autopsy.asked or 0):
        return None
    holder = held.holder
    fillers = [] if holder.path == ".grad" else fillers_of(holder) or assigned_at(holder)
    filler = fillers[0] if fillers else None
    enough = autopsy.asked is None or held.nbytes >= autopsy.asked
    by_gradients = holder.path == ".grad" and _create_graph(autopsy) is not None
    name = "the gradients" if holder.path == ".grad" else f"`{holder.path}`"
    draft = Draft(
        CODE,
        NAME,
        "proven" if enough and (filler is not None or by_gradients) else "likely",
        f"{name} {'keep' if holder.path == '.grad' else 'keeps'} {size(held.nbytes)} "
        f"alive in {'its graphs' if held.of_this_step else 'the graphs of earlier steps'}",
        _cause(held),
    )
    label = f"{name} is filled here" if held.is_container else f"{name} is carried on from here"
    if filler is not None:
        draft.at(filler.location("cause", label), *noticed(autopsy))
    elif holder.path == ".grad" and (place := _create_graph(autopsy)) is not None:
        draft.at(place.location("cause", "its gradients hold the graph"), *noticed(autopsy))
    else:
        draft.at(*evidence.at_user_line("cause", "memory ran out here"))
    draft.because(*table(autopsy))
    for other in autopsy.retained[1:3]:
        draft.because(f"`{other.holder.path}` also holds graphs: {count(other.nodes, 'node')}, {size(other.nbytes)}")
    draft.help(_advice(held, filler, autopsy))
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _cause(held: Retained) -> str:
    what = count(held.tensors, "tensor") if held.is_container else "it"
    verb = "leads" if held.tensors == 1 or not held.is_container else "lead"
    when = "that no backward has been through" if held.of_this_step else "that were built before this step"
    return f"{what} {verb} to {count(held.nodes, 'node')} of graphs {when}"


def _advice(held: Retained, filler: Filler | None, autopsy: Autopsy) -> str:
    if held.holder.path == ".grad":
        return "use `torch.autograd.grad(..., create_graph=True)` and clear the gradients with `zero_grad()`"
    text = filler.text if filler is not None else ""
    if isinstance(held.holder.owner, BaseException):
        return "keep the text of the exception, not the exception: it holds the frames that it came through"
    short = text if len(text) <= 40 and text.isidentifier() and _holds_tensors(held.holder.owner) else ""
    ways = ["item", "detach"] if held.is_scalar else ["detach"]
    what = "it" if _holds_tensors(held.holder.owner) else "its tensors"
    keep = " or ".join(f"`{short}.{way}()`" for way in ways) + ("" if short else f" of {what}")
    advice = f"keep {keep} instead"
    if any(not module.training for module in _roots(autopsy)):
        advice += ", and evaluate under `torch.no_grad()`"
    return advice


def _holds_tensors(owner: Any) -> bool:
    """Whether what is kept are tensors themselves, and not objects with tensors in them."""
    kept = list(owner.values() if isinstance(owner, dict) else owner) if isinstance(owner, _CONTAINERS) else [owner]
    return all(isinstance(each, torch.Tensor) for each in kept)


def _roots(autopsy: Autopsy) -> list[torch.nn.Module]:
    step = autopsy.step
    return step.runner.modules if step is not None else []


def _is_for_backward(held: Retained) -> bool:
    """Whether the function that fills it goes backward, or another one through it: then the graphs may be wanted."""
    fillers = fillers_of(held.holder)
    name = held.holder.path.partition("[")[0].rpartition(".")[2]
    if not fillers or is_differentiated_later(frozenset({name})):
        return True
    tree = syntax_tree(fillers[0].file)
    line = fillers[0].node.lineno
    inside: ast.AST | None = tree
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            inside = node
    names = {node.attr for node in ast.walk(inside) if isinstance(node, ast.Attribute)} if inside is not None else set()
    return not names.isdisjoint({"backward", "grad"})


def _create_graph(autopsy: Autopsy) -> Filler | None:
    """The call that leaves gradients with a graph."""
    for frame in reversed(autopsy.evidence.frames):
        for node in ast.walk(frame.tree) if frame.is_user and frame.tree is not None else ():
            if isinstance(node, ast.Call) and any(each.arg == "create_graph" for each in node.keywords):
                return Filler(frame.file, node, None, True)
    return None


RULE = Rule(CODE, NAME, check)
