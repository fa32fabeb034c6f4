"""Makes a failing program smaller, as property-based testing does: change it, keep the change if it still fails.

The cause of the failure must stay the same. So zeros are neither added nor removed, signs and infinities stay, no
dimension becomes empty, and infinity must not turn into NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from torchmedic.repro import shapes, simpler_calls, values
from torchmedic.repro.program import Program
from torchmedic.repro.search import Budget, Shrinker


def shrunk(program: Program, budget: Budget | None = None, *, enough: int | None = None) -> Program:
    """A smaller program that fails in the same way, or the program itself.

    Args:
        program: The failing program.
        budget: The limits of the search.
        enough: Stop at a program of at most this many bytes.
    """
    shrinker = Shrinker(program, budget or Budget(), enough)
    if not program.holds():
        return program
    passes: list[Callable[[Shrinker], None]] = [
        simpler_calls.plain_settings,
        simpler_calls.plain_layouts,
        values.constant,
        simpler_calls.drop_arguments,
        simpler_calls.drop_list_members,
        shapes.crop,
        shapes.squeeze,
        values.constant,
        simpler_calls.simple_backward,
        simpler_calls.drop_gradients,
        values.rounded,
        values.one_by_one,
    ]
    for shrink in passes:
        if shrinker.is_over:
            break
        shrink(shrinker)
    return shrinker.best
