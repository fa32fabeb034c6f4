"""Updates in a row that can be run again: a copy of the weights, and the backward calls that followed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.state_copies import Copy


class Window(NamedTuple):
    """A copy, and the backward calls that followed it without a gap."""

    copy: Copy
    calls: list[KeptBackward]
    reaches_present: bool  # the last of them is the last that there was
    is_departure: bool = False  # in these updates the loss left its level


def windows_of(
    copies: Iterable[Copy | None], calls: Iterable[KeptBackward], first_calls: list[KeptBackward]
) -> Iterator[Window]:
    """The updates that can be run again from each copy.

    Args:
        copies: The first is from the beginning of training.
        calls: The last calls, oldest first.
        first_calls: The calls at the beginning of training.
    """
    known = [call for call in calls if not call.is_sampled_out]
    recent = [call for call in known if not call.is_repeated or call is known[-1]]
    for position, copy in enumerate(copies):
        if copy is None or not copy.tensors:
            continue
        early = first_calls if position == 0 else []
        later = {id(call): call for call in [*early, *recent] if call.update >= copy.update}
        found = _without_gap(list(later.values()), copy.update)
        if found:
            last = recent[-1] if recent else found[-1]
            yield Window(_renewed(copy, found[0], last), found, found[-1] is last)


def _renewed(copy: Copy, first: KeptBackward, last: KeptBackward) -> Copy:
    """A copy for the tensors that the loop trains now, where it binds new ones in every step."""
    old, new = first.leaves, last.leaves
    if not old or len(old) != len(new) or any(leaf.tensor() is not None for leaf in old):
        return copy
    pairs = [(one.tensor, other.alias) for one, other in zip(new, old, strict=True)]
    return copy._replace(tensors=[(reference, value) for reference, value in pairs if value is not None])


def _without_gap(calls: list[KeptBackward], first: int) -> list[KeptBackward]:
    """The calls from an update on, as far as none is missing."""
    found: list[KeptBackward] = []
    expected = first
    for call in calls:
        if call.update > expected + 1 or (not found and call.update != first):
            break
        expected = call.update
        found.append(call)
    return found
