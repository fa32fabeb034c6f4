"""A container keeps tensors with their autograd graphs: every step adds one, and none is removed.

What: a list, dict or similar container of the training script grows step by step, and the tensors in it still have a
`grad_fn`. Each tensor keeps the whole graph of its step alive. Until a backward has gone through that graph, it keeps
all saved activations too; afterwards it still keeps thousands of nodes.

Why: `losses.append(loss)` instead of `losses.append(loss.item())`; outputs or features collected for a metric; a
forward hook that collects activations; a replay buffer filled with outputs of the model; exceptions that are kept with
their frames. No single container has to grow: each node of a linked list or of a tree may keep one tensor.

Cure: store a number (`loss.item()`) or a tensor without its graph (`out.detach()`, with `.cpu()` if it is large), or
empty the container when it is no longer needed. In validation, collect under `torch.no_grad()`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import detached, edited, end, graph, limit, measured, period, span, where
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.evidence.leaks.source.sites import Site, arguments_behind, is_argument
from torchmedic.observe.heap.weighing import Weight
from torchmedic.records import Role
from torchmedic.source.live_frames import node_location


@rule("TM450", "graphs-kept")
def check(evidence: LeakEvidence) -> Draft | None:
    growth, weight = evidence.growth, evidence.growth.weight
    if growth.what != "graphs":
        return None
    if growth.period == "batch" and not evidence.is_critical:
        return None  # nothing was trained: they may all be wanted for one backward
    passes = evidence.is_emptied or evidence.is_of_library  # a library may well empty what it has filled
    if (passes and not evidence.is_notable) or evidence.may_fill_up or evidence.may_be_given_up:
        return None
    name = growth.held.name
    pieces = growth.held.kind == "reached"
    things = "tensors" if pieces else "items"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` keeps the autograd graph of every {period(evidence)}: {growth.held.size} {things} by now"
    draft.cause = (
        f"`{name}` leads to ever more tensors with a `grad_fn`{_way(growth.held.via)}, and the oldest is still there"
        if pieces
        else f"the items of `{name}` {_are(weight)} tensors with a `grad_fn`, and the first of them is still there"
    )
    put, giver = evidence.put, evidence.giver
    # A helper that stores whatever is given to it, by name or by the dozen, is not to blame.
    is_passed_on = giver is not None and put is not None and not is_argument(put)
    label = f"each {period(evidence)} puts {_count(growth.rate)} in here"
    draft.at(evidence.at_put("origin" if is_passed_on else "cause", label))
    if giver is not None:
        role: Role = "cause" if is_passed_on else "origin"
        draft.at(node_location(role, giver.file, giver.node, "given here with its graph"))
    draft.because(
        f"it grew with every {period(evidence)} {span(evidence)}",
        where(evidence),
        limit(evidence),
        graph(evidence, "one of them"),
        measured(evidence),
        end(evidence),
        "the source has a line that empties it, but it has not run for a long time" if evidence.is_emptied else "",
    )
    put = giver if is_passed_on else put
    if evidence.goes_backward:
        draft.help(f"empty `{name}` as soon as the backward has used it")
    elif put is not None and put.value is not None and isinstance(put.value, ast.expr):
        single = weight is not None and not growth.held.via and _is_single(put, weight)
        patch = edited(put, put.value, detached(put.value)) if single else ""
        draft.help(
            "keep it without its graph" if patch else "keep `.item()` or `.detach()` of the tensors in it", patch=patch
        )
    else:
        draft.help(f"put `.item()` or `.detach()` of the tensors into `{name}`, or empty it regularly")
    return draft.rated("warning")


def _are(weight: Weight | None) -> str:
    return "are" if weight is not None and weight.kinds == {"Tensor"} else "hold"


def _way(via: str) -> str:
    return f", one behind the other by way of `{via}`" if via.isidentifier() else ""


def _is_single(put: Site, weight: Weight) -> bool:
    """Whether the line puts in one tensor that it makes or knows itself; an argument may be anything."""
    value = put.value
    if weight.kinds != {"Tensor"} or not isinstance(
        value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp | ast.Call
    ):
        return False
    if isinstance(value, ast.Name) and arguments_behind(put):
        return False
    return isinstance(put.node, ast.Call) or (
        isinstance(put.node, ast.Assign) and isinstance(put.node.targets[0], ast.Subscript)
    )


def _count(rate: float) -> str:
    if rate < 0.75:
        return "one now and then"
    return "one" if rate < 1.5 else f"about {rate:.0f}"
