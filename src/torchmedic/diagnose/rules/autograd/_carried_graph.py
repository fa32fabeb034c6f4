"""A graph from before the step: which variable carries it in, and whether the step passes without it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten
from torchmedic.diagnose.cures.graph_edits import detached_in, reads_before, uses_in
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.carried_tensors import carrier_of
from torchmedic.evidence.leaks.source.sites import Site
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.observe.heap.walk import Held
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.older_graph import Import, Imports
from torchmedic.source.live_frames import node_location
from torchmedic.source.objects.graph import leaves_behind, walk
from torchmedic.source.spots import spot_of_node
from torchmedic.source.user_variables import loaded_files

Begin = Callable[[str, Import], Draft]  # a draft whose cause is what a variable carries


def looked_at(
    failure: BackwardFailure, *, spent: bool = True
) -> tuple[Imports, ReplayResult, list[Import], bool] | None:
    """A replay of the step up to its last backward, and what that backward goes into that is older (and spent).

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
    old = [one for one in found if one.is_spent(failure.sequence_number)] if spent else found
    return imports, played, old, _only_way_to_weights(roots, found)


def _only_way_to_weights(roots: Sequence[Any], old: list[Import]) -> bool:
    """Whether the loss reaches no weight behind the old graphs by another way: detached, these would not be trained."""
    if any(one.tensor is root for one in old for root in roots):
        return False  # written in place: `total += loss`
    seen = {one.tensor.grad_fn for one in old}
    reached = {id(getattr(node, "variable", None)) for node in walk([root.grad_fn for root in roots], seen)}
    return not any(id(leaf) in reached for leaf in leaves_behind([one.tensor for one in old]))


def carried_in(
    begin: Begin,
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
        return None
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
    draft = begin(f"`{name}` comes from before this step and still carries its history", found)
    if filled is not None:
        draft.at(node_location("cause", filled.file, filled.node, f"adds to `{name}`, and nothing empties it"))
    else:
        draft.at(made.location("cause", f"`{name}` keeps its graph from here on"))
    for spot in uses(found)[:1]:
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


def uses(found: Import) -> list[Spot]:
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
