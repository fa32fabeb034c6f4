"""`backward()` reached a part of the graph that an earlier `backward()` had already freed.

What: `backward()` frees the tensors that the forward pass saved. A later backward that reaches the same part of the
graph finds them gone.

Why: a tensor of an earlier step is used again with its graph (a hidden state, a running loss, a value computed once
before the loop), or two losses of one step share a part of the graph and each gets its own `backward()`.

Cure: detach every tensor that is carried from step to step, compute everything that depends on the weights inside the
loop, and add up losses that share a graph before one `backward()`. `retain_graph=True` is seldom the right cure: it
keeps the graphs of old steps alive too.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten
from torchmedic.diagnose.cures.graph_edits import detached_in, retained, uses_in
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.carried_tensors import carrier_in_generator, carrier_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.replay.step.result import BackwardCall, ReplayResult
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.older_graph import GraphHolder, Import, Imports
from torchmedic.replay.trace.provenance import FunctionCall
from torchmedic.source.bindings import function_body
from torchmedic.source.objects.graph import is_freed, leaves_behind, nodes_behind
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import LOOPS, calls_in, has_line, innermost

_MESSAGE = "backward reached a part of the graph that was already freed"


@rule("TM104", "backward-through-freed-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("backward through the graph a second time"):
        return None
    failure = BackwardFailure(evidence)
    draft = _replayed(failure) if failure.engine is not None else None
    if draft is None:
        draft = check.draft(evidence, "likely", _MESSAGE, "torch found that the saved values of a node are gone")
        draft.at(failure.caller.location("cause", "the second backward") if failure.caller is not None else None)
        draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
        draft.help("detach what is carried over from earlier steps, or add the losses up before one backward")
    elif failure.caller is not None:
        draft.at(failure.caller.location("surfaced", "the second time, here"))
    return draft


def _replayed(failure: BackwardFailure) -> Draft | None:
    failure.replay()
    found = _looked_at(failure)
    if found is None:
        return None
    imports, played, old = found
    if not old:
        return _same_step(failure, imports, played)
    made = [carrier[1] for one in old if (carrier := carrier_of(failure, imports, one)) is not None]
    if _only_goes_back(failure, made):
        narrow = failure.step
        for _ in itertools.islice(failure.widen(), 1, None):
            wider = _looked_at(failure)
            draft = _same_step(failure, wider[0], wider[1]) if wider is not None and not wider[2] else None
            if draft is not None:
                return draft
        failure.step = narrow
    return _carried(failure, imports, old)


def _looked_at(failure: BackwardFailure) -> tuple[Imports, ReplayResult, list[Import]] | None:
    """A replay of the step up to its last backward, and what that backward goes into that is older and spent."""
    step = failure.step
    if step is None:
        return None
    imports = Imports(step.segment.file)
    played = step.runner.play(imports, backward=False)
    if not played.backward_calls:
        return None
    found = imports.behind_roots(played.backward_calls[-1].roots, step.frame)
    return imports, played, [one for one in found if one.is_spent(failure.sequence_number)]


def _only_goes_back(failure: BackwardFailure, made: list[Filler]) -> bool:
    """Whether the innermost loop around backward trains nothing, and goes back from what was computed before it."""
    frame = failure.caller
    body = function_body(frame) if frame is not None else None
    loop = innermost(body, frame.line, LOOPS) if frame is not None and body else None
    if frame is None or loop is None or not made:
        return False
    inside = any(each.file != frame.file or has_line(loop, each.node.lineno) for each in made)
    calls = (node.func for node in calls_in(loop))
    steps = any(isinstance(function, ast.Attribute) and function.attr == "step" for function in calls)
    return not inside and not steps


# A graph from before the step


def _carried(failure: BackwardFailure, imports: Imports, old: list[Import], *, repeated: bool = False) -> Draft | None:
    """A variable brings the graph of an earlier step in; or of an earlier turn of a loop that repeats only backward."""
    carriers = [(found, carrier) for found in old if (carrier := carrier_of(failure, imports, found)) is not None]
    if not carriers:
        hidden = carrier_in_generator(failure, [one.tensor for one in old])
        if hidden is None:
            return _nameless(failure, old)
        carriers = [(old[0], hidden)]
    found, (name, made) = max(carriers, key=lambda pair: pair[1][1].in_loop)
    freed = sum(is_freed(node) for node in nodes_behind([found.tensor]))
    why = f"`{name}` comes from before this step and still carries its history, of which an earlier backward freed"
    draft = check.draft(failure.evidence, "proven", _MESSAGE, f"{why} {freed} node{'s' if freed != 1 else ''}")
    draft.at(made.location("cause", f"`{name}` keeps its graph from here on"))
    for spot in _uses(found)[:1]:
        draft.at(spot.location("origin", f"`{name}` is taken into this step's graph here"))
    trials = GraphTrials(failure)
    if made.in_loop and not repeated:
        title = f"detach `{name}` where the next step takes it over"
        candidates = ((title, edit) for edit in _detached(found))
        treated = trials.first(candidates, same_loss=False, keep_graphs=False, safety="changes-training")
        draft.treat(treated)
        return draft if treated is not None else draft.help(f"detach `{name}` before the next step takes it over")
    # To detach it would only hide that the weights behind it are never trained.
    title = f"compute `{name}` in every step"
    treated = trials.first(_again(found, name, made, title), same_loss=False, keep_graphs=False)
    return draft.treat(
        treated, otherwise=f"compute `{name}` in every step, or under `torch.no_grad()` if it shall not be trained"
    )


def _nameless(failure: BackwardFailure, old: list[Import]) -> Draft | None:
    """No variable is known to hold it, but the line that uses it is."""
    spots = [spot for found in old for spot in _uses(found)]
    if not spots:
        return None
    draft = check.draft(
        failure.evidence, "likely", _MESSAGE, "a tensor from before this step still carries its history"
    )
    draft.at(spots[0].location("cause", "takes a graph of an earlier step in"))
    return draft.help("detach what comes from an earlier step before it is used again")


def _uses(found: Import) -> list[Spot]:
    return [holder.spot for holder in found.holders]


def _detached(found: Import) -> Iterator[Edit]:
    """The tensor detached at its use, in the innermost frame that has a name for it."""
    for holder in found.holders:
        yield from detached_in(holder.spot, holder.name, is_item=holder.is_item)


def _again(found: Import, name: str, made: Filler, title: str) -> Iterator[Candidate]:
    """The expression that made the variable, written out where the variable is used."""
    if not isinstance(made.node, ast.Assign) or not isinstance(made.node.targets[0], ast.Name):
        return
    text = called(rewritten(made.file, made.node.value), made.node.value)
    for holder in found.holders:
        if holder.name == name and holder.spot.file == made.file:
            for use in uses_in(holder.spot, holder.name):
                yield title, Edit(spot_of_node(holder.spot.file, use, holder.spot.function), text)


# Two backward calls of one step


def _same_step(failure: BackwardFailure, imports: Imports, played: ReplayResult) -> Draft | None:
    """Two backward calls of one step meet in the same part of the graph."""
    calls = [call for call in played.backward_calls if call.spot is not None]
    last = calls[-1] if calls else None
    if last is None or len(calls) < 2:
        return None
    mine = nodes_behind(last.roots)
    for call in reversed(calls[:-1]):
        shared = mine & nodes_behind(call.roots)
        if not shared or call.keeps_graph:
            continue
        assert call.spot is not None
        assert last.spot is not None
        if any(root.grad_fn is other.grad_fn for root in last.roots for other in call.roots):
            if call.stack == last.stack:
                return _carried(failure, imports, _as_imports(played, last), repeated=True)
            draft = check.draft(failure.evidence, "proven", _MESSAGE, "backward is called twice on the same loss")
            draft.at(_own_spot(last, call).location("cause", "the same loss again"))
            draft.at(_own_spot(call, last).location("origin", "the first time"))
            return draft.help("call backward once per loss")
        others = _for_others(failure, imports, played, call, shared)
        return others or _two_losses(failure, imports, played, call, shared)
    return None


def _own_spot(call: BackwardCall, other: BackwardCall) -> Spot:
    """The innermost line of one of two calls that is not a line of the other: they may come from one helper."""
    different = [spot for spot in call.stack if spot not in other.stack]
    return (different or list(call.stack))[0]


def _as_imports(played: ReplayResult, call: BackwardCall) -> list[Import]:
    """The roots of a backward that a loop repeats, as what they are to that loop: computed before it."""
    assert call.spot is not None
    return [
        Import(root, (GraphHolder(name, None, False, call.spot, is_local=False, is_passing=False),))
        for root in call.roots
        for name, value in played.namespace.items()
        if value is root
    ]


def _for_others(
    failure: BackwardFailure, imports: Imports, played: ReplayResult, first: BackwardCall, shared: set[Any]
) -> Draft | None:
    """The first loss goes through weights that its optimizer does not update: it should not have (a GAN)."""
    number = 1 + next(at for at, call in enumerate(played.backward_calls) if call is first)
    updated = {
        id(tensor)
        for optimizer, after in played.updates
        if number <= after < len(played.backward_calls)
        for group in optimizer.param_groups
        for tensor in group["params"]
    }
    common = {id(leaf) for leaf in leaves_behind(first.roots)}
    beyond = [leaf for node in shared for leaf in [getattr(edge, "variable", None) for edge, _ in node.next_functions]]
    weights = [leaf for leaf in beyond if leaf is not None and id(leaf) in common]
    if not updated or not weights or any(id(leaf) in updated for leaf in weights):
        return None
    entry = _entry(imports, nodes_behind(first.roots) - shared, shared)
    if entry is None:
        return None
    call, tensor = entry
    for spot in call.stack:
        for name in (name for name, value in played.namespace.items() if value is tensor):
            candidates = ((f"detach `{name}` for the first loss", edit) for edit in detached_in(spot, name))
            treated = GraphTrials(failure).first(candidates, keep_graphs=False)
            if treated is None:
                continue
            why = f"the first backward also goes through `{name}` and frees its graph; it updates nothing behind it"
            draft = check.draft(failure.evidence, "proven", _MESSAGE, why)
            draft.at(spot.location("cause", f"`{name}` is taken in with its graph"))
            draft.at(first.spot.location("origin", "freed here") if first.spot is not None else None)
            return draft.treat(treated)
    return None


def _entry(imports: Imports, own: set[Any], shared: set[Any]) -> tuple[FunctionCall, Any] | None:
    """The first call by which a shared tensor goes into a loss's own part of the graph."""
    for call in imports.calls:
        if any(tensor.grad_fn in own for tensor in call.outputs):
            for tensor in call.inputs:
                if tensor.grad_fn is not None and tensor.grad_fn in shared:
                    return call, tensor
    return None


def _two_losses(
    failure: BackwardFailure, imports: Imports, played: ReplayResult, first: BackwardCall, shared: set[Any]
) -> Draft:
    assert first.spot is not None
    why = f"the two losses share {len(shared)} nodes of the graph, and the first backward freed them"
    draft = check.draft(failure.evidence, "proven", _MESSAGE, why)
    place = _own_spot(first, played.backward_calls[-1])
    draft.at(place.location("cause", "this backward frees the shared part"))
    used = [
        gradient
        for gradient in played.returned
        for call in imports.behind(played.backward_calls[-1].roots[-1])
        if any(given is gradient for given in call.inputs)
    ]
    candidates = retained(first.spot, differentiable=bool(used))
    treated = GraphTrials(failure).first(candidates, same_loss=not used, keep_graphs=False)
    draft.treat(treated)
    if not used:
        draft.help(
            "add the losses up and call backward once" if treated is None else "or add the losses up for one backward"
        )
    return draft
