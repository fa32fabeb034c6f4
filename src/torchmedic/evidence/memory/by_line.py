"""Saved activations by line and layer: what the live graph holds, with the lines that a fake replay gives to its nodes.

The bytes are those of the live graph wherever it is there. The replay says which line made the node of that number.
Where it cannot follow the step, a node of a layer leads to the layer's own weights, which name the layer; the line is
the one call of it in the `forward` of the user's class that holds it. What is left is the kind of the node.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch

from torchmedic.evidence.memory.accounting.book import SavedHere
from torchmedic.evidence.memory.accounting.saved_by_graph import saving_line
from torchmedic.evidence.memory.fake.ledger import ByteLedger, Place, Saved
from torchmedic.source.spots import Spot, spot_of_node
from torchmedic.source.syntax import calls_in, function_of, syntax_tree
from torchmedic.source.user_code import is_user_file

Method = Literal["fake replay", "live graph", "live tensors"]
_MIN_MATCHED_SHARE = 0.8  # share of the bytes that must be found in the replay
_MAX_DRIFT = 12  # nodes that the numbers may drift apart between two saved tensors


class Line(NamedTuple):
    """What one line of the user's, or one kind of node, keeps for backward."""

    nbytes: int
    tensors: int
    spot: Spot | None
    modules: tuple[str, ...]  # the biggest first
    node: str = ""


class Alignment:
    """The nodes of the live graph beside those of the replay.

    Both are numbered in the order in which they were made. Where fakes took another way through an operation than the
    device did, the numbers drift apart by a few; the sizes of what was saved bring them together again.
    """

    def __init__(self, entries: list[SavedHere], since: int, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._since = since
        known: dict[int, dict[int, Place]] = {}
        for made in ledger.saved.values():
            known.setdefault(made.sequence, {})[made.nbytes] = made.place
        self._drifts: list[tuple[int, int]] = []
        self.placed: list[tuple[SavedHere, Place]] = []
        self.matched: set[tuple[int, int]] = set()  # number and bytes in the replay
        drift, same = 0, set()
        for each in sorted(entries, key=lambda entry: entry.sequence):
            number, nbytes = each.sequence - since, each.memory.nbytes
            found = next((to for to in _around(drift) if nbytes in known.get(number + to, ())), None)
            if found is None:
                self.placed.append((each, ledger.places.get(number + drift, Place(None, ""))))
                continue
            drift = found
            same.add(each.sequence)
            self._drifts.append((each.sequence, drift))
            self.matched.add((number + drift, nbytes))
            self.placed.append((each, known[number + drift][nbytes]))
        # Not all of a node's tensors need be the same: fakes do not know the work space that cuDNN keeps.
        total = sum(entry.memory.nbytes for entry in entries)
        agreed = sum(entry.memory.nbytes for entry in entries if entry.sequence in same)
        self.is_trusted = bool(total) and agreed >= _MIN_MATCHED_SHARE * total

    def place_of(self, sequence: int) -> Place | None:
        """Where the node of this number was made."""
        drift = next((drift for at, drift in reversed(self._drifts) if at <= sequence), 0)
        return self._ledger.places.get(sequence - self._since + drift)


def _around(drift: int) -> Iterator[int]:
    yield drift
    for distance in range(1, _MAX_DRIFT):
        yield drift + distance
        yield drift - distance


def by_line(
    saved: Iterable[SavedHere], since: int, ledger: ByteLedger | None, layers: Layers
) -> tuple[list[Line], Method]:
    """The lines that save most for backward, the biggest first, and how they were found."""
    entries = list(saved)
    if ledger is None or not entries:
        return by_layer(entries, layers), "live graph"
    aligned = Alignment(entries, since, ledger)
    if not aligned.is_trusted:
        return by_layer(entries, layers), "live graph"
    return summed([(entry.memory.nbytes, _saving(entry, place)) for entry, place in aligned.placed]), "fake replay"


def _saving(entry: SavedHere, place: Place) -> Place:
    """For a custom Function, the line that saves a tensor instead of the line that applies the Function."""
    spot = saving_line(entry.function) if entry.function is not None else None
    return place._replace(spot=spot) if spot is not None else place


def lost_lines(saved: Iterable[SavedHere], since: int, ledger: ByteLedger) -> list[Saved]:
    """What the replay saved up to the failure and the live graph no longer has: freed while the exception unwound."""
    there = Alignment(list(saved), since, ledger).matched
    return [each for each in ledger.saved.values() if (each.sequence, each.nbytes) not in there]


def by_replay(saved: Iterable[Saved]) -> list[Line]:
    return summed([(each.nbytes, each.place) for each in saved])


def merged(one: list[Line], two: list[Line]) -> list[Line]:
    """Join two lists of lines; equal lines are added up."""
    sums: dict[tuple[str, int, str], Line] = {}
    for line in [*one, *two]:
        key = (line.spot.file, line.spot.line, "") if line.spot is not None else ("", 0, line.node)
        known = sums.get(key)
        if known is None:
            sums[key] = line
        else:
            modules = tuple(dict.fromkeys((*known.modules, *line.modules)))
            sums[key] = known._replace(
                nbytes=known.nbytes + line.nbytes, tensors=known.tensors + line.tensors, modules=modules
            )
    return sorted(sums.values(), key=lambda line: -line.nbytes)


def by_layer(saved: Iterable[SavedHere], layers: Layers) -> list[Line]:
    """Group saved tensors without a replay: by the layer whose weights were used, else by the kind of operation."""
    placed: list[tuple[int, Place]] = []
    others: list[SavedHere] = []
    for each in saved:
        place = _saving(each, layers.place(each.weights) or Place(None, ""))
        if place.spot is None:
            others.append(each)
        else:
            placed.append((each.memory.nbytes, place))
    return merged(summed(placed), _by_node(others))


def _by_node(saved: Iterable[SavedHere]) -> list[Line]:
    """Group saved tensors by the kind of operation."""
    sums: dict[str, tuple[int, int]] = {}
    for each in saved:
        nbytes, count = sums.get(each.node, (0, 0))
        sums[each.node] = (nbytes + each.memory.nbytes, count + 1)
    lines = [Line(nbytes, count, None, (), node) for node, (nbytes, count) in sums.items()]
    return sorted(lines, key=lambda line: -line.nbytes)


def summed(placed: Iterable[tuple[int, Place]]) -> list[Line]:
    """Add up bytes by place, the biggest first."""
    sums: dict[tuple[str, int], tuple[int, int, Spot | None, dict[str, int]]] = {}
    for nbytes, place in placed:
        spot = place.spot
        key = (spot.file, spot.line) if spot is not None else ("", 0)
        total, count, first, modules = sums.get(key, (0, 0, spot, {}))
        modules[place.module] = modules.get(place.module, 0) + nbytes
        sums[key] = (total + nbytes, count + 1, first, modules)
    lines = [
        Line(total, count, spot, tuple(sorted(filter(None, modules), key=lambda name: -modules[name])))
        for total, count, spot, modules in sums.values()
    ]
    return sorted(lines, key=lambda line: -line.nbytes)


class Layers:
    """The layers of all models by their weights."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._owner: dict[int, torch.nn.Module] = {}
        self._parent: dict[int, tuple[torch.nn.Module, str]] = {}
        self._known: dict[int, Place] = {}  # by the identity of a layer
        for module in modules:
            for parameter in module.__dict__.get("_parameters", {}).values():
                if parameter is not None:
                    self._owner[id(parameter)] = module
            for name, child in module.__dict__.get("_modules", {}).items():
                if child is not None:
                    self._parent[id(child)] = (module, name)

    def place(self, weights: Iterable[int]) -> Place | None:
        """The layer that has these weights, and the line that calls it."""
        owners = {id(found): found for each in weights if (found := self._owner.get(each)) is not None}
        if len(owners) != 1:
            return None
        (layer,) = owners.values()
        if id(layer) not in self._known:
            self._known[id(layer)] = self._find(layer)
        return self._known[id(layer)]

    def _find(self, layer: torch.nn.Module) -> Place:
        names: list[str] = []
        spot: Spot | None = None
        while id(layer) in self._parent and len(names) < 64:
            layer, name = self._parent[id(layer)]
            names.insert(0, name)
            spot = spot or _call(type(layer), name)
        return Place(spot, ".".join(names))


def _call(kind: type, name: str) -> Spot | None:
    """The one call of `self.<name>` in the `forward` of a class of the user's."""
    forward = inspect.unwrap(kind.__dict__["forward"]) if "forward" in kind.__dict__ else None
    code = getattr(forward, "__code__", None)
    if code is None or not code.co_argcount or not is_user_file(code.co_filename):
        return None
    function = function_of(syntax_tree(code.co_filename), code)
    calls = [node for node in calls_in(function) if ast.unparse(node.func) == f"{code.co_varnames[0]}.{name}"]
    return spot_of_node(code.co_filename, calls[0], "forward") if len(calls) == 1 else None
