"""What stands behind one name in many pieces, none of which grows by itself: a linked list, a tree, lists in a dict.

The walk over the user's variables hands in every tensor that it meets, with the branch that led there. A branch that
meets the same attribute of the same class again is one structure from there on, however deep it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_MIN_PIECES = 4
_MIN_BYTES = 1 << 20


class Edge(NamedTuple):
    """An attribute on the way to an object, the name of the object that it belongs to, and the edge before."""

    kind: type
    attribute: str
    owner: Any
    before: Edge | None


def same_edge(edge: Edge | None, kind: type, attribute: str) -> Edge | None:
    """The edge of this attribute of this class, where the way has come along one: then it leads along a chain."""
    while edge is not None and (edge.attribute != attribute or edge.kind is not kind):
        edge = edge.before
    return edge


class Branch(NamedTuple):
    """The way from a variable to an object."""

    start: Visit | None = None  # of the structure; None as long as every piece has a name of its own
    via: str = ""
    edges: Edge | None = None
    inner: str = ""  # the attribute of one piece that was met last
    share: float = 1.0  # how many alike one piece stands for; 0 where they are bounded by themselves

    def along(self, owner: Visit, kind: type, attribute: str, *, is_key: bool = False) -> tuple[Branch, bool]:
        """The branch after an attribute, or a key of a small container, and whether the branch meets it first here."""
        edge = same_edge(self.edges, kind, attribute)
        if edge is not None:
            return (self if self.start is not None else self._replace(start=edge.owner, via=attribute)), False
        inner = self.inner if is_key else attribute if self.start is not None else ""
        return self._replace(edges=Edge(kind, attribute, owner, self.edges), inner=inner), True

    def among_many(self, container: Visit, share: float) -> Branch:
        """The branch after an item of a container."""
        return self._replace(start=self.start or container, share=self.share * share)


ROOT = Branch()


class Visit(NamedTuple):
    """An object that the walk is about to look at, and what the user's source calls it: see `Held`."""

    value: Any
    name: str
    last: str
    depth: int
    file: str
    local: int
    branch: Branch = ROOT
    owner: type | None = None  # of which `last` is an attribute


class LinkedPieces:
    """Sums over the structures that one walk meets."""

    def __init__(self) -> None:
        self._graphs: dict[str, tuple[Branch, float, int]] = {}
        self._data: dict[str, tuple[Branch, float, float]] = {}

    def add_graph(self, branch: Branch, number: int) -> tuple[int, str]:
        """Count a tensor whose graph is old; the key of its structure among the holders of the walk."""
        if branch.start is None:
            return (0, "")
        name = branch.start.name
        first, count, oldest = self._graphs.get(name, (branch, 0.0, number))
        self._graphs[name] = (branch if branch.via else first, count + branch.share, min(oldest, number))
        return (0, f"reached {name}")

    def add_data(self, branch: Branch, nbytes: int) -> None:
        if branch.start is not None and branch.share:
            name = branch.start.name
            first, total, count = self._data.get(name, (branch, 0.0, 0.0))
            self._data[name] = (branch if branch.via else first, total + branch.share * nbytes, count + branch.share)

    def found(self) -> Iterator[tuple[str, Visit, Branch, int, int]]:
        """Kind, begin, branch, `Held.size` and `Held.old` of each structure that is worth a note."""
        for branch, count, oldest in self._graphs.values():
            if branch.start is not None and count >= _MIN_PIECES:
                yield "reached", branch.start, branch, round(count), oldest
        for branch, total, count in self._data.values():
            if branch.start is not None and count >= _MIN_PIECES and total >= _MIN_BYTES:
                yield "mass", branch.start, branch, round(total), round(count)
