"""Make a failing program smaller, as a property-based tester would: change it, keep the change if it still fails.

What made it fail must stay the cause. So a zero is never put where there was none and never taken away, signs and
infinities stay, no dimension becomes empty, and NaN for infinity is no fair exchange.
"""

from __future__ import annotations

from collections.abc import Callable

from torchmedic.repro import shapes, simpler_calls, values
from torchmedic.repro.program import Program
from torchmedic.repro.search import Budget, Shrinker


def shrunk(program: Program, budget: Budget | None = None, *, enough: int | None = None) -> Program:
    """A smaller program that fails in the same way, or the same one.

    Args:
        program: One that fails.
        budget: When to stop.
        enough: Stop as soon as it takes no more bytes than this.
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
