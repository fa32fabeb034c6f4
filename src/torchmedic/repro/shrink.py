"""Makes a failing program smaller, as property-based testing does: change it, keep the change if it still fails.

The cause of the failure must stay the same. So zeros are neither added nor removed, signs and infinities stay, no
dimension becomes empty, and infinity must not turn into NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from torchmedic.repro import shapes, values
from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Line, Many, Raises, Ref
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
        _plain_settings,
        _plain_layouts,
        values.constant,
        _drop_arguments,
        _drop_list_members,
        shapes.crop,
        shapes.squeeze,
        values.constant,
        _simple_backward,
        _drop_gradients,
        values.rounded,
        values.one_by_one,
    ]
    for shrink in passes:
        if shrinker.is_over:
            break
        shrink(shrinker)
    return shrinker.best


def _plain_settings(shrinker: Shrinker) -> None:
    if shrinker.best.recipe.autocast:
        shrinker.offer(shrinker.best.with_recipe(autocast=""))
    if shrinker.best.recipe.deterministic:
        shrinker.offer(shrinker.best.with_recipe(deterministic=False))


def _plain_layouts(shrinker: Shrinker) -> None:
    for given in shrinker.best.inputs:
        if given.layout:
            shrinker.offer(shrinker.best.with_input(given.name, layout="", order=()))


def _drop_gradients(shrinker: Shrinker) -> None:
    recipe = shrinker.best.recipe
    if isinstance(recipe.outcome, Raises) and any("backward" in line.target for line in recipe.lines):
        return  # the failure needs the graph
    for given in shrinker.best.inputs:
        if given.grad == "no" or shrinker.offer(shrinker.best.with_input(given.name, grad="no")):
            continue
        if given.grad != "leaf":
            shrinker.offer(shrinker.best.with_input(given.name, grad="leaf"))


def _drop_arguments(shrinker: Shrinker) -> None:
    """Drop arguments that the failing call does not need, such as a bias."""
    at = len(shrinker.best.recipe.lines) - 1
    if not isinstance(shrinker.best.recipe.outcome, Raises) or "backward" in shrinker.best.recipe.lines[at].target:
        return  # a default could be another reason for NaN, and in a sub-graph the call itself does not fail
    for key in list(shrinker.best.recipe.lines[at].kwargs):
        line = shrinker.best.recipe.lines[at]
        rest = {name: value for name, value in line.kwargs.items() if name != key}
        shrinker.offer(_with_line(shrinker.best, at, msgspec.structs.replace(line, kwargs=rest)))
    if shrinker.best.recipe.lines[at].target.startswith("Tensor."):
        return  # the arguments of methods such as `view` are no defaults
    while len(args := shrinker.best.recipe.lines[at].args) > 1:
        line = msgspec.structs.replace(shrinker.best.recipe.lines[at], args=args[:-1])
        if line.target.startswith("operator.") or not shrinker.offer(_with_line(shrinker.best, at, line)):
            break


def _drop_list_members(shrinker: Shrinker) -> None:
    """Drop tensors from the list of `cat` or `stack` that the failure does not need."""
    for at, line in enumerate(shrinker.best.recipe.lines):
        for position, argument in enumerate(line.args):
            if isinstance(argument, Many) and len(argument.items) > 1 and isinstance(argument.items[0], Ref):
                member = len(argument.items) - 1
                while member >= 0 and not shrinker.is_over:
                    shrinker.offer(_without_member(shrinker.best, at, position, member))
                    member -= 1


def _without_member(program: Program, at: int, position: int, member: int) -> Program | None:
    line = program.recipe.lines[at]
    argument = line.args[position]
    if not isinstance(argument, Many) or len(argument.items) < 2:
        return None
    items = argument.items[:member] + argument.items[member + 1 :]
    args = (*line.args[:position], msgspec.structs.replace(argument, items=items), *line.args[position + 1 :])
    return _with_line(program, at, msgspec.structs.replace(line, args=args))


def _simple_backward(shrinker: Shrinker) -> None:
    """Use `result.sum().backward()` if the incoming gradient does not matter."""
    lines = shrinker.best.recipe.lines
    for at, line in enumerate(lines):
        if line.target == "Tensor.backward" and len(line.args) == 2:
            simple = Line(target="sum_backward", args=line.args[:1], note=line.note)
            shrinker.offer(_with_line(shrinker.best, at, simple))


def _with_line(program: Program, at: int, line: Line) -> Program:
    lines = program.recipe.lines
    return _without_unused(program.with_recipe(lines=(*lines[:at], line, *lines[at + 1 :])))


def _without_unused(program: Program) -> Program:
    used = {name for line in program.recipe.lines for name in _names(line)}
    return program.with_recipe(inputs=tuple(given for given in program.inputs if given.name in used))


def _names(line: Line) -> Iterator[str]:
    pending = [*line.args, *line.kwargs.values()]
    while pending:
        argument = pending.pop()
        if isinstance(argument, Ref):
            yield argument.name
        elif isinstance(argument, Many):
            pending.extend(argument.items)
