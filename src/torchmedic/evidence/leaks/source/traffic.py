"""The lines of the user's code that put something into a holder, take something out or start it anew."""

from __future__ import annotations

from collections.abc import Iterable

from torchmedic.evidence.leaks.source.container_traffic import of_container
from torchmedic.evidence.leaks.source.piece_traffic import of_hooks, of_inner, of_pieces
from torchmedic.evidence.leaks.source.sites import Traffic
from torchmedic.observe.heap.walk import Held


def traffic(held: Held, files: Iterable[str]) -> Traffic:
    """Every line that may change a holder, those that put tensors in before those that put in numbers.

    Args:
        held: The holder.
        files: Of the user's.
    """
    known = list(dict.fromkeys([held.file, *files])) if held.file else list(files)
    if held.kind == "hooks":
        return of_hooks(held, known)
    if held.inner:
        return of_inner(held, known)
    if held.via:
        return of_pieces(held, known)
    return of_container(held, known)
