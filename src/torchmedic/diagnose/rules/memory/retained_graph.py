"""The graphs of earlier steps are still referenced, and fill the memory.

What: a tensor that is kept from an earlier step keeps its autograd graph, and the graph keeps every activation that it
has saved. The memory fills step by step.

Why: `losses.append(loss)`, `total += loss`, outputs or hidden states that are passed to the next step, a replay buffer
filled with outputs of the model, a hook that collects tensors, a closure, an exception that is kept, gradients of
`backward(create_graph=True)`.

Cure: keep a number (`loss.item()`), or a tensor without its graph (`.detach()`); use `torch.no_grad()` for code that
needs no gradients. If one backward is meant to go through all of the graphs, call backward more often.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft, RuleAnswer, rule
from torchmedic.diagnose.rules.memory._growth import grown_meanwhile, was_warned
from torchmedic.diagnose.rules.memory._table import noticed, table
from torchmedic.diagnose.rules.memory.collected_tensors import is_collecting
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.cures.forked import TrialPlan
from torchmedic.evidence.memory.fake.whole_step import Change, Cut
from torchmedic.evidence.memory.retained_graphs import Retained
from torchmedic.evidence.memory.source.fillers import Filler, assigned_at, fillers_of, is_looped
from torchmedic.evidence.memory.wanted_graphs import evaluation_of, in_parts, is_wanted
from torchmedic.source.syntax import nodes_in

_MIN_SHARE = 0.25  # share of all tensors
_MIN_SHARE_WANTED = 0.5  # of all tensors, of graphs that a backward is still to go through
_MIN_GROWN_SHARE = 0.1  # share of all that the process has
_WARNINGS = ("TM450", "TM451")
_CONTAINERS = (list, tuple, set, deque, dict)


class _Blamed(NamedTuple):
    """Graphs that are kept, and how much they explain."""

    held: Retained
    is_wanted: bool  # one backward is still to go through them
    filler: Filler | None
    hidden: int  # bytes by which the process grew, where little is held
    is_enough: bool  # more is held than was asked for

    @property
    def name(self) -> str:
        return "the gradients" if self.held.holder.path == ".grad" else f"`{self.held.holder.path}`"


@rule("TM403", "retained-graph")
def check(evidence: RaisedEvidence) -> Draft | RuleAnswer | None:
    autopsy = evidence.autopsy
    blamed = _blamed(evidence, autopsy) if autopsy is not None else None
    if autopsy is None or blamed is None:
        return None
    held, filler, name = blamed.held, blamed.filler, blamed.name
    of_gradients = held.holder.path == ".grad"
    made = _create_graph(autopsy) if of_gradients else None
    draft = check.draft(
        evidence, "proven" if blamed.is_enough and (filler is not None or made is not None) else "likely"
    )
    draft.message = (
        f"{name} {'keep' if of_gradients else 'keeps'} {size(held.nbytes)} "
        f"alive in {'its graphs' if held.of_this_step or blamed.is_wanted else 'the graphs of earlier steps'}"
    )
    draft.cause = _cause(held, blamed.is_wanted)
    if filler is not None:
        label = f"{name} is filled here" if held.is_container else f"{name} is carried on from here"
        draft.at(filler.location("cause", label), *noticed(autopsy))
    elif made is not None:
        draft.at(made.location("cause", "its gradients hold the graph"), *noticed(autopsy))
    else:
        draft.at(*evidence.at_user_line("cause", "memory ran out here"))
    if blamed.hidden:
        grown = size(blamed.hidden)
        draft.because(f"the process grew by {grown} while this grew: what is kept keeps the heap in pieces")
    draft.because(*table(autopsy))
    for other in autopsy.retained[1:3]:
        draft.because(f"`{other.holder.path}` also holds graphs: {count(other.nodes, 'node')}, {size(other.nbytes)}")
    if blamed.is_wanted:
        return draft.help(in_parts(held))
    advice = _advice(held, filler, autopsy)
    draft.help(advice)
    plan = TrialPlan(known=Change(cut=Cut(tuple(_tensors(held, autopsy)), advice)))
    return RuleAnswer(draft.done(), plan)


def _blamed(evidence: RaisedEvidence, autopsy: Autopsy) -> _Blamed | None:
    """The graphs that fill the memory: those that nobody needs, else those that one backward is to go through."""
    held = next((each for each in autopsy.retained if not is_wanted(each, evidence)), None)
    wanted = held is None
    if held is None:
        held = next((each for each in autopsy.retained if _is_put_off(each, autopsy)), None)
    if held is None or (held.for_nothing and _is_evaluation(autopsy)) or _is_heavy_itself(held, autopsy):
        return None
    filler, asked = _filler(held), autopsy.asked or 0
    is_much = not held.only_nodes and held.nbytes >= _MIN_SHARE * max(autopsy.book.everything, asked)
    hidden = 0 if is_much or filler is None else _hidden(autopsy, filler)
    if not is_much and not hidden:
        return None
    return _Blamed(held, wanted, filler, hidden, is_much and held.nbytes >= asked)


def _is_heavy_itself(held: Retained, autopsy: Autopsy) -> bool:
    """Whether a container would keep most of it without the graphs too: TM412 advises to keep less."""
    return held.is_container and 2 * held.own_nbytes > held.nbytes and is_collecting(autopsy)


def _is_evaluation(autopsy: Autopsy) -> bool:
    """Whether the model is in evaluation mode: there TM405 advises to switch gradients off."""
    found = evaluation_of(autopsy)
    return found is not None and found.is_declared


def _is_put_off(held: Retained, autopsy: Autopsy) -> bool:
    """Whether one backward is to go through many graphs that have nothing to do with each other, and they fill it."""
    return held.is_container and held.is_of_parts and held.nbytes >= _MIN_SHARE_WANTED * autopsy.book.everything


def _filler(held: Retained) -> Filler | None:
    """The line that fills a container, or that makes a variable from its own last value."""
    holder = held.holder
    if holder.path == ".grad":
        return None
    base = re.sub(r"\[[^]]*\]$", "", holder.path)  # of a pair that a recurrent layer gives, say
    if not held.is_container and base.isidentifier():
        assigned = assigned_at(holder._replace(path=base))
        carried = [each for each in assigned if is_looped(each) and _mentions(each.value, base)]
        if carried:
            return carried[0]
    return next(iter(fillers_of(holder) or assigned_at(holder)), None)


def _mentions(value: ast.expr | None, name: str) -> bool:
    return value is not None and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value))


def _tensors(held: Retained, autopsy: Autopsy) -> Iterator[torch.Tensor]:
    """All tensors behind a name, also where only a part of them was counted."""
    for each in autopsy.found:
        holder = each.holder
        same = (holder.file, holder.function) == (held.holder.file, held.holder.function)
        if same and re.fullmatch(re.escape(held.holder.path) + r"([.\[].*)?", holder.path):
            yield each.tensor


def _hidden(autopsy: Autopsy, filler: Filler) -> int:
    """Bytes by which the process grew although little is held; 0 if something else may explain the growth."""
    grown = grown_meanwhile(autopsy)
    if grown < max(autopsy.asked or 0, _MIN_GROWN_SHARE * autopsy.measured.used):
        return 0
    return grown if was_warned(autopsy, filler, _WARNINGS) else 0


def _cause(held: Retained, wanted: bool) -> str:
    what = count(held.tensors, "tensor") if held.is_container else "it"
    verb = "leads" if held.tensors == 1 or not held.is_container else "lead"
    when = "that no backward has freed" if held.of_this_step else "that were built before this step"
    when = "that one later backward still needs" if wanted else when
    return f"{what} {verb} to {count(held.nodes, 'node')} of graphs {when}"


def _advice(held: Retained, filler: Filler | None, autopsy: Autopsy) -> str:
    if held.holder.path == ".grad":
        return "use `torch.autograd.grad(..., create_graph=True)` and clear the gradients with `zero_grad()`"
    text = filler.text if filler is not None else ""
    if any(isinstance(each, BaseException) for each in _kept(held.holder.owner)):
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
    return all(isinstance(each, torch.Tensor) for each in _kept(owner))


def _kept(owner: Any) -> list[Any]:
    """The items of a container; any other object alone."""
    return list(owner.values() if isinstance(owner, dict) else owner) if isinstance(owner, _CONTAINERS) else [owner]


def _roots(autopsy: Autopsy) -> list[torch.nn.Module]:
    step = autopsy.step
    return step.runner.modules if step is not None else []


def _create_graph(autopsy: Autopsy) -> Filler | None:
    """The call that leaves gradients with a graph."""
    for frame in reversed(autopsy.evidence.frames):
        for node in nodes_in(frame.tree if frame.is_user else None):
            if isinstance(node, ast.Call) and any(each.arg == "create_graph" for each in node.keywords):
                return Filler(frame.file, node, None, True)
    return None
