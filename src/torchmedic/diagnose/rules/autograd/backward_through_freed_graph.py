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
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten
from torchmedic.diagnose.cures.graph_edits import detached_in, reads_before, uses_in
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._two_losses import TwoLosses, for_others, own_spot, shared_by_both
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.carried_tensors import carrier_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.leaks.source.sites import Site
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.observe.heap.walk import Held
from torchmedic.replay.step.result import BackwardCall, ReplayResult
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.older_graph import GraphHolder, Import, Imports
from torchmedic.source.live_frames import node_location
from torchmedic.source.objects.graph import following, is_freed, leaves_behind, nodes_behind, walk
from torchmedic.source.segment.cut import loops_around
from torchmedic.source.spots import spot_of_node
from torchmedic.source.user_variables import loaded_files

_MESSAGE = "backward reached a part of the graph that was already freed"


@rule("TM104", "backward-through-freed-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("backward through the graph a second time"):
        return None
    failure = BackwardFailure(evidence)
    draft = _replayed(failure) if failure.engine is not None else None
    if draft is None:
        draft = check.draft(evidence, "likely", _MESSAGE, "torch found that the saved values of a node are gone")
        draft.mark(failure.caller, "cause", "the second backward")
        draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
        draft.help("detach what is carried over from earlier steps, or add the losses up before one backward")
    else:
        draft.mark(failure.caller, "surfaced", "the second time, here")
    return draft


def _replayed(failure: BackwardFailure) -> Draft | None:
    failure.replay()
    found = _looked_at(failure)
    if found is None:
        return None
    imports, played, old, alone = found
    if not old:
        return _same_step(failure, imports, played)
    # A loop over losses computes nothing itself: the losses are those of the loop around it.
    is_loop_of_losses = all(imports.is_old(root) for root in played.backward_calls[-1].roots)
    if alone or is_loop_of_losses:
        narrow = before = failure.step
        for number, step in enumerate(itertools.islice(failure.widen(), 1, None)):
            inside = is_loop_of_losses and not number
            if not inside and before is not None and loops_around(before.frame, before.segment.lines[-1]):
                break  # a loop around the step: what is wider holds earlier steps
            before = step
            wider = _looked_at(failure)
            draft = _same_step(failure, wider[0], wider[1]) if wider is not None and not wider[2] else None
            if draft is not None:
                return draft
        failure.step = narrow
    return _carried(failure, imports, played, old, alone=alone)


def _only_way_to_weights(roots: Sequence[Any], old: list[Import]) -> bool:
    """Whether the loss reaches no weight behind the old graphs by another way: detached, these would not be trained."""
    if any(one.tensor is root for one in old for root in roots):
        return False  # written in place: `total += loss`
    seen = {one.tensor.grad_fn for one in old}
    reached = {id(getattr(node, "variable", None)) for node in walk([root.grad_fn for root in roots], seen)}
    return not any(id(leaf) in reached for leaf in leaves_behind([one.tensor for one in old]))


def _looked_at(failure: BackwardFailure) -> tuple[Imports, ReplayResult, list[Import], bool] | None:
    """A replay of the step up to its last backward, and what that backward goes into that is older and spent.

    The last value says whether older graphs, spent or not, are the only way to the weights behind them.
    """
    step = failure.step
    if step is None:
        return None
    imports = Imports(step.segment.file)
    played = step.runner.play(imports, backward=False)
    if not played.backward_calls:
        return None
    roots = played.backward_calls[-1].roots
    found = imports.behind_roots(roots, step.frame)
    spent = [one for one in found if one.is_spent(failure.sequence_number)]
    return imports, played, spent, _only_way_to_weights(roots, found)


# A graph from before the step


def _carried(
    failure: BackwardFailure,
    imports: Imports,
    played: ReplayResult,
    old: list[Import],
    *,
    repeated: bool = False,
    alone: bool = False,
) -> Draft | None:
    """A variable brings the graph of an earlier step in; or of an earlier turn of a loop that repeats only backward."""
    carriers = [(found, carrier) for found in old if (carrier := carrier_of(failure, imports, found)) is not None]
    if not carriers:
        return _nameless(failure, old)
    found, (name, made) = max(carriers, key=lambda pair: pair[1][1].in_loop)
    trials = GraphTrials(failure)
    treated = None
    if made.in_loop and not repeated and not alone:
        whole = imports.edges_since(played.backward_calls[-1].roots)
        options: dict[str, Any] = {
            "same_loss": False,
            "keep_graphs": False,
            "safety": "changes-training",
            # Detached in each turn of a loop, it would cut the step itself as well.
            "accepts": lambda trial: imports.edges_since(trial.backward_calls[-1].roots) >= whole,
        }
        with _replaced(found, name):
            treated = trials.first(_stored(name, made), **options)
        if treated is None:
            title = f"detach `{name}` where the next step takes it over"
            treated = trials.first(((title, edit) for edit in _detached(found)), **options)
    is_item = any(each.name == name and each.is_item for each in found.holders)
    filled = _filled_only(name, made) if treated is None and is_item and not repeated else None
    freed = sum(is_freed(node) for node in nodes_behind([found.tensor]))
    why = f"`{name}` comes from before this step and still carries its history, of which an earlier backward freed"
    draft = check.draft(failure.evidence, "proven", _MESSAGE, f"{why} {count(freed, 'node')}")
    if filled is not None:
        draft.at(node_location("cause", filled.file, filled.node, f"adds to `{name}`, and nothing empties it"))
    else:
        draft.at(made.location("cause", f"`{name}` keeps its graph from here on"))
    for spot in _uses(found)[:1]:
        draft.at(spot.location("origin", f"`{name}` is taken into this step's graph here"))
    if filled is not None:
        draft.because(f"no line removes anything from `{name}`, so each step goes through all steps before it")
        return draft.help(f"empty `{name}` after each update of the weights, with `{name}.clear()` for instance")
    if made.in_loop and not repeated:
        if alone:
            draft.because(f"the loss trains the weights behind `{name}`: to detach it here would stop that")
            return draft.help(f"detach `{name}` for the earlier loss, or add the losses up and call backward once")
        return draft.treat(treated, otherwise=f"detach `{name}` before the next step takes it over")
    # To detach it would only hide that the weights behind it are never trained.
    title = f"compute `{name}` in every step"
    treated = trials.first(_again(found, name, made, title), same_loss=False, keep_graphs=False)
    return draft.treat(
        treated, otherwise=f"detach `{name}` where it is made if it shall not be trained, or compute it in every step"
    )


def _filled_only(name: str, made: Filler) -> Site | None:
    """The line that adds to a container from which no line removes anything."""
    found = traffic(Held(name, name.rpartition(".")[2], "items", 0, made.file, 0), loaded_files())
    calls = [put for put in found.puts if isinstance(put.node, ast.Call)]
    return calls[0] if calls and not found.takes and not found.is_limited else None


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


@contextlib.contextmanager
def _replaced(found: Import, name: str) -> Iterator[None]:
    """The attribute without its graph, as the step before would have left it with the cure."""
    holder = next((each for each in found.holders if each.name == name and each.owner and not each.is_item), None)
    if holder is None:
        yield
        return
    attribute = name.rpartition(".")[2]
    before = getattr(holder.owner, attribute)
    setattr(holder.owner, attribute, found.tensor.detach())
    try:
        yield
    finally:
        setattr(holder.owner, attribute, before)


def _stored(name: str, made: Filler) -> Iterator[Candidate]:
    """The statement that gives an attribute its value, without the graph."""
    node = made.node
    if isinstance(node, ast.Assign) and "." in name and len(node.targets) == 1 and ast.unparse(node.targets[0]) == name:
        text = f"{called(rewritten(made.file, node.value), node.value)}.detach()"
        yield f"detach `{name}` where it is kept", Edit(spot_of_node(made.file, node.value), text)


def _detached(found: Import) -> Iterator[Edit]:
    """The tensor detached at its use, first where it is carried, then in functions that were only given it.

    A function may read an attribute into a variable of its own: then it is detached there.
    """
    for holder in sorted(found.holders, key=lambda holder: holder.is_passing):
        spots = [holder.spot, *(reads_before(holder.spot, holder.name) if holder.owner is not None else [])]
        for spot in spots:
            yield from detached_in(spot, holder.name, is_item=holder.is_item)


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
        if any(_unscaled(root) is _unscaled(other) for root in last.roots for other in call.roots):
            if call.stack == last.stack:
                return _carried(failure, imports, played, _as_imports(played, last), repeated=True)
            draft = check.draft(failure.evidence, "proven", _MESSAGE, "backward is called twice on the same loss")
            draft.at(own_spot(last, call).location("cause", "the same loss again"))
            draft.at(own_spot(call, last).location("origin", "the first time"))
            return draft.help("call backward once per loss")
        begin = functools.partial(check.draft, failure.evidence, "proven", _MESSAGE)
        losses = TwoLosses(failure, imports, played, call, shared)
        return for_others(begin, losses) or shared_by_both(begin, losses)
    return None


def _unscaled(root: Any) -> Any:
    """The node of a loss before it was multiplied or divided by numbers, as libraries do for each backward."""
    node = root.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0") and len(following(node)) == 1:
        node = following(node)[0]
    return node


def _as_imports(played: ReplayResult, call: BackwardCall) -> list[Import]:
    """The roots of a backward that a loop repeats, as what they are to that loop: computed before it."""
    assert call.spot is not None
    return [
        Import(root, (GraphHolder(name, None, False, call.spot, is_local=False, is_passing=False),))
        for root in call.roots
        for name, value in played.namespace.items()
        if value is root
    ]
