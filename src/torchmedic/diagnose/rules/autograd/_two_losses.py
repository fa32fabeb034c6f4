"""Two losses of one step that share a part of the graph, and each get a backward of their own: which one to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchmedic.diagnose.cures.edits import statement_at
from torchmedic.diagnose.cures.graph_edits import detached_in, retained
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.step.result import BackwardCall, ReplayResult
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.older_graph import Imports
from torchmedic.replay.trace.provenance import FunctionCall
from torchmedic.source.assignments import names_read
from torchmedic.source.objects.graph import following, leaves_behind, nodes_behind


class TwoLosses(NamedTuple):
    """A replay of the step in which the last backward reaches nodes that an earlier one has freed."""

    failure: BackwardFailure
    imports: Imports
    played: ReplayResult
    first: BackwardCall
    shared: set[Any]


def own_spot(call: BackwardCall, other: BackwardCall) -> Spot:
    """The innermost line of one of two calls that is not a line of the other: they may come from one helper."""
    different = [spot for spot in call.stack if spot not in other.stack]
    return (different or list(call.stack))[0]


def for_others(begin: Callable[[str], Draft], losses: TwoLosses) -> Draft | None:
    """One of the losses goes through weights that its optimizer does not update: it should not have (a GAN).

    That is the first loss where the optimizer that steps behind it has other weights; it is the last one where the
    shared weights have been updated by then, and an optimizer has what the last loss goes through beside them.
    """
    failure, imports, played, first, shared = losses
    last = played.backward_calls[-1]
    number = 1 + next(at for at, call in enumerate(played.backward_calls) if call is first)
    stepped = [each for each, after in played.updates if number <= after < len(played.backward_calls)]
    updated = set(map(id, parameters_of(*stepped)))
    weights = {id(leaf) for leaf in _leaves(shared)}
    own = {id(leaf) for leaf in _leaves(nodes_behind(last.roots) - shared)}
    if not updated or not weights:
        return None
    if weights.isdisjoint(updated):
        whose, call, kept = "first", first, -1
    elif weights <= updated and own and own.isdisjoint(updated):
        whose, call, kept = "last", last, number - 1
    else:
        return None

    def trains_them_still(trial: ReplayResult) -> bool:
        """Whether the other loss still reaches the shared weights: a line of a shared module serves both losses."""
        calls = trial.backward_calls
        is_whole = len(calls) == len(played.backward_calls)
        return is_whole and weights <= {id(leaf) for leaf in leaves_behind(calls[kept].roots)}

    entry = _entry(imports, nodes_behind(call.roots) - shared, shared)
    names = [name for name, value in played.namespace.items() if entry is not None and value is entry[1]]
    for spot in entry[0].stack if entry is not None else ():
        statement = statement_at(spot)
        read = names_read(statement) if statement is not None else set()  # in a function, names of its own
        for name in dict.fromkeys([*names, *sorted(read)]):
            candidates = ((f"detach `{name}` for the {whose} loss", edit) for edit in detached_in(spot, name))
            treated = GraphTrials(failure).first(candidates, keep_graphs=False, accepts=trains_them_still)
            if treated is None:
                continue
            why = f"the {whose} backward also goes through `{name}`, and updates nothing behind it"
            draft = begin(why)
            draft.at(spot.location("cause", f"`{name}` is taken in with its graph"))
            draft.mark(first.spot, "origin", "freed here")
            return draft.treat(treated)
    return None


def _leaves(nodes: set[Any]) -> list[Any]:
    """The weights that nodes hand their gradients to."""
    found = [getattr(after, "variable", None) for node in nodes for after in following(node)]
    return [leaf for leaf in found if leaf is not None]


def _entry(imports: Imports, own: set[Any], shared: set[Any]) -> tuple[FunctionCall, Any] | None:
    """The first call by which a shared tensor goes into a loss's own part of the graph."""
    for call in imports.calls:
        if any(tensor.grad_fn in own for tensor in call.outputs):
            for tensor in call.inputs:
                if tensor.grad_fn is not None and tensor.grad_fn in shared:
                    return call, tensor
    return None


def shared_by_both(begin: Callable[[str], Draft], losses: TwoLosses) -> Draft:
    """Both losses train the shared part: keep its graph for the second backward, or call backward once."""
    failure, imports, played, first, shared = losses
    assert first.spot is not None
    why = f"the two losses share {len(shared)} nodes of the graph, and the first backward freed them"
    draft = begin(why)
    place = own_spot(first, played.backward_calls[-1])
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
