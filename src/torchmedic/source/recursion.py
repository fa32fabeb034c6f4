"""The part of a very deep stack that repeats."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchmedic.records import StackFrame

_MAX_TURN_FRAMES = 60
_MIN_TURNS = 3


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """`turn` is one round of the recursion, outermost frame first: its last frame calls its first function again."""

    turn: tuple[StackFrame, ...]
    start: int  # position of the first round in the stack, outermost frame counted as 0
    turns: int


def cycle_in(stack: Sequence[StackFrame]) -> Cycle | None:
    """The recursion at the end of a stack (outermost frame first), if it went round at least three times."""
    for ending in range(min(_MAX_TURN_FRAMES, len(stack))):
        # The limit may be hit in the middle of a round, or in a helper that the round calls.
        whole = stack[: len(stack) - ending]
        for length in range(1, min(_MAX_TURN_FRAMES, len(whole) // _MIN_TURNS) + 1):
            if not all(_same(whole[-1 - at], whole[-1 - at - length]) for at in range(length * (_MIN_TURNS - 1))):
                continue
            start = len(whole) - length
            while start > 0 and _same(whole[start - 1], whole[start - 1 + length]):
                start -= 1
            return Cycle(turn=tuple(whole[start : start + length]), start=start, turns=(len(whole) - start) // length)
    return None


def _same(one: StackFrame, two: StackFrame) -> bool:
    return one == two
