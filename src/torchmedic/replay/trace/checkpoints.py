"""What ran inside each activation checkpoint of a replay, in the forward pass and when it was computed again."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.spots import user_spots
from torchmedic.source.syntax import CALLABLES, nodes_in, syntax_tree


class Ran(NamedTuple):
    """One call of torch's Python API inside a checkpoint."""

    name: str
    spot: Spot | None
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] | None  # None where it was not run to its end

    @property
    def where(self) -> tuple[str, int] | None:
        return (self.spot.file, self.spot.line) if self.spot is not None else None


class Recording(TorchFunctionMode):
    """The calls of one run of a checkpointed function."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Ran] = []
        self.stopped = False  # all that backward needs was there before the end

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)  # type: ignore[no-untyped-call]
        self.stopped = kind is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spots = user_spots(sys._getframe(1))
        name, number = str(getattr(func, "__name__", "")), len(self.ran)
        # Noted before it runs: the second run is stopped inside of a call.
        self.ran.append(Ran(name, spots[0] if spots else None, None))
        result = func(*args, **(kwargs or {}))
        made = tuple((tuple(part.shape), part.dtype) for part in tree_iter(result) if isinstance(part, torch.Tensor))
        if made:
            self.ran[number] = self.ran[number]._replace(outputs=made)
        else:
            del self.ran[number:]
        return result


class Checkpoint(NamedTuple):
    """One call of `checkpoint`."""

    spot: Spot | None
    original: Recording
    again: Recording


class Difference(NamedTuple):
    """The first call at which the two runs of a checkpointed function differ."""

    original: Ran | None
    again: Ran | None


@contextlib.contextmanager
def watch_checkpoints(seen: list[Checkpoint]) -> Iterator[None]:
    """Record both runs of every checkpoint that is not reentrant."""
    module: Any = __import__("torch.utils.checkpoint", fromlist=["*"])
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(module, f"{name}_impl"):  # torch 2.15, with another order of arguments
        name = f"{name}_impl"
    original: Callable[..., Any] = getattr(module, name)
    signature = inspect.signature(original)

    def generator(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["context_fn"] is module.noop_context_fn:
            spots = user_spots(sys._getframe(1))
            noted = Checkpoint(spots[0] if spots else None, Recording(), Recording())
            seen.append(noted)
            given.arguments["context_fn"] = lambda: (noted.original, noted.again)
        return original(*given.args, **given.kwargs)

    setattr(module, name, generator)
    try:
        yield
    finally:
        setattr(module, name, original)


def difference(checkpoint: Checkpoint) -> Difference | None:
    """Where the second run left the way of the first; it may rightly be stopped before the end."""
    first, second = checkpoint.original.ran, checkpoint.again.ran
    for one, other in zip(first, second, strict=False):
        same_outputs = one.outputs == other.outputs or one.outputs is None or other.outputs is None
        if (one.name, one.where) != (other.name, other.where) or not same_outputs:
            return Difference(one, other)
    if len(second) > len(first):
        return Difference(None, second[len(first)])
    if len(second) < len(first) and second and not checkpoint.again.stopped:
        return Difference(first[len(second)], None)
    return None


def deciding(found: Difference) -> tuple[str, ast.expr] | None:
    """The condition that went one way in one run and another way in the other."""
    one, other = found.original, found.again
    spots = [ran.spot for ran in (one, other) if ran is not None and ran.spot is not None]
    if not spots or (one is not None and other is not None and one.where == other.where):
        return None
    file = spots[0].file
    lines = [spot.line if spot.file == file else 0 for spot in spots]
    lines += [0] * (2 - len(lines))  # a run that was over is outside of everything
    best: _Branching | None = None
    for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.For) and _side(node, lines[0]) != _side(
            node, lines[1]
        ):
            best = node if best is None or node.lineno >= best.lineno else best
    if best is None or not _same_function(file, best.lineno, spots[0].line):
        return None
    return file, best.iter if isinstance(best, ast.For) else best.test


_Branching = ast.If | ast.IfExp | ast.While | ast.For


def _same_function(file: str, line: int, other: int) -> bool:
    """A loop around the checkpoint itself decides nothing inside of it."""
    tree = syntax_tree(file)
    functions = [
        {at for at in (line, other) if node.lineno <= at <= (node.end_lineno or node.lineno)}
        for node in nodes_in(tree)
        if isinstance(node, CALLABLES)
    ]
    return all(len(found) != 1 or line == other for found in functions)


def _side(node: _Branching, line: int) -> int:
    """In which part of a statement a line lies; 0 outside of it."""
    for number, part in enumerate((node.body, node.orelse), 1):
        inner = part if isinstance(part, list) else [part]
        if inner and inner[0].lineno <= line <= (inner[-1].end_lineno or inner[-1].lineno):
            return number
    return 0
