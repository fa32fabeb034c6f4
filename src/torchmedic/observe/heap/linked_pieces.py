"""What stands behind one name in many pieces, none of which grows by itself: a linked list, a tree, lists in a dict.

The walk over the user's variables hands in every tensor that it comes by, with the branch that it has come along. A
branch that meets the same attribute of the same class again is one structure from there on, however deep it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_SEVERAL = 4
_NOTABLE = 1 << 20  # bytes


class Place(NamedTuple):
    """Where a structure begins, in the words of the source: see `Held`."""

    name: str
    last: str
    file: str
    local: int


class _Edge(NamedTuple):
    """An attribute that the branch has come along, and the object that it belongs to."""

    kind: type
    attribute: str
    owner: Place
    before: _Edge | None


class Branch(NamedTuple):
    place: Place | None = None  # None as long as every piece has a name of its own
    via: str = ""
    edges: _Edge | None = None
    inner: str = ""  # the attribute of one piece that was met last
    share: float = 1.0  # how many alike one piece stands for; 0 where they are bounded by themselves

    def along(self, owner: Any, kind: type, attribute: str, *, is_key: bool = False) -> tuple[Branch, bool]:
        """The branch after an attribute, or a key of a small container, and whether that is one it had not met yet."""
        edge = self.edges
        while edge is not None:
            if edge.attribute == attribute and edge.kind is kind:
                return (self if self.place is not None else self._replace(place=edge.owner, via=attribute)), False
            edge = edge.before
        inner = self.inner if is_key else attribute if self.place is not None else ""
        return self._replace(edges=_Edge(kind, attribute, _place(owner), self.edges), inner=inner), True

    def among_many(self, container: Any, share: float) -> Branch:
        """The branch after an item of a container."""
        return self._replace(place=self.place or _place(container), share=self.share * share)


ROOT = Branch()


class Crowd(NamedTuple):
    kind: str
    place: Place
    via: str
    inner: str
    size: int
    oldest: int


class Crowds:
    """The sums of one walk."""

    def __init__(self) -> None:
        self._graphs: dict[str, tuple[Branch, float, int]] = {}
        self._data: dict[str, tuple[Branch, float, float]] = {}

    def graph(self, branch: Branch, number: int) -> tuple[int, str]:
        """A tensor whose graph is old. What its holder is called among those of the walk."""
        if branch.place is None:
            return (0, "")
        name = branch.place.name
        first, count, oldest = self._graphs.get(name, (branch, 0.0, number))
        self._graphs[name] = (branch if branch.via else first, count + branch.share, min(oldest, number))
        return (0, f"reached {name}")

    def data(self, branch: Branch, nbytes: int) -> None:
        if branch.place is not None and branch.share:
            name = branch.place.name
            first, total, count = self._data.get(name, (branch, 0.0, 0.0))
            self._data[name] = (branch if branch.via else first, total + branch.share * nbytes, count + branch.share)

    def found(self) -> Iterator[Crowd]:
        for branch, count, oldest in self._graphs.values():
            if branch.place is not None and count >= _SEVERAL:
                yield Crowd("reached", branch.place, branch.via, branch.inner, round(count), oldest)
        for branch, total, count in self._data.values():
            if branch.place is not None and count >= _SEVERAL and total >= _NOTABLE:
                yield Crowd("mass", branch.place, branch.via, branch.inner, round(total), round(count))


def _place(todo: Any) -> Place:
    return Place(todo.name, todo.last, todo.file, todo.local)
