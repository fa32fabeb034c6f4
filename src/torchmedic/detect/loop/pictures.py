"""Pictures whose pixels were cut apart, by a view that should exchange dimensions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident, PicturesCutApart
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, calls_in
from torchmedic.source.user_variables import user_trees


def find(habits: Habits) -> Iterator[LoopIncident]:
    for event in habits.events:
        found = event.fact.cut if event.kind == "fetch" else None
        if found is not None:
            call, cause = _call(found.shape) or ("", event.place)
            yield PicturesCutApart(
                step=event.step,
                cause=cause,
                call=call,
                data=event.place,
                name=found.name,
                shape=found.shape,
                compared=found.compared,
            )
            return


def _call(shape: tuple[int, int, int]) -> tuple[str, Place] | None:
    """The only call that gives something this shape; where numbers do not tell, the only one with so many sizes."""
    known: list[tuple[str, Place]] = []
    possible: list[tuple[str, Place]] = []
    for file, tree in user_trees():
        for call in calls_in(tree, "view", "reshape"):
            sizes = call.args[-1].elts if call.args and isinstance(call.args[-1], ast.Tuple | ast.List) else call.args
            last = sizes[-3:]
            if len(last) < 3 or any(isinstance(size, ast.Starred) for size in last):
                continue
            pairs = zip(last, shape, strict=True)
            numbers = [(size.value, wanted) for size, wanted in pairs if isinstance(size, ast.Constant)]
            if all(number == wanted for number, wanted in numbers):
                (known if len(numbers) == 3 else possible).append((callee(call), Place(file, call.lineno)))
    places = list(dict.fromkeys(known or possible))
    return places[0] if len(places) == 1 else None
