"""A checkpointed function behaved differently when backward computed it again.

What: activation checkpointing discards what the forward pass saved and computes it again in backward. Both runs must
save the same tensors, in number, shape and dtype.

Why: the function depends on something that changes between the two runs: a counter, a cache that grows, a random number
from Python or NumPy (only the random state of torch is restored), a flag, or a data-dependent branch.

Cure: make the function depend only on its inputs: decide outside the function and pass the decision in.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import dtype
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.live_frames import node_location
from torchmedic.source.spots import user_spots
from torchmedic.source.syntax import CALLABLES, nodes_in, syntax_tree

_OF_MODULES = frozenset(vars(torch.nn.Module()))
_MAX_REPLAYS = 12  # what depends on chance does not differ in every replay


@rule("TM114", "checkpoint-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "CheckpointError" not in evidence.kinds or not (
        evidence.says("different number of tensors") or evidence.says("recomputed", "different metadata")
    ):
        return None
    failure = BackwardFailure(evidence)
    found, calls = _replayed(failure)
    draft = check.draft(evidence, "proven" if found is not None else "likely")
    draft.message = "a checkpointed function did something else when it was computed again"
    draft.cause = _why(found[1]) if found is not None else "it saved other tensors in backward than in the forward pass"
    if found is not None:
        checkpoint, first = found
        _place(draft, first)
        draft.mark(checkpoint.spot, "origin", "checkpointed here")
        draft.because(f"replayed: call {_number(checkpoint, first)} of the function was the first to differ")
    else:
        spots = [call.spot for call in calls if call.spot is not None]
        if spots:
            draft.at(spots[-1].location("cause", "the function that is checkpointed here"))
        else:
            draft.mark(failure.caller, "cause", "noticed here")
        draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
        draft.because("\n".join(evidence.message.splitlines()[:4])[:300])
    draft.mark(failure.caller, "surfaced", "computed again here")
    return draft.help(
        "make the function depend on its inputs alone: decide before the checkpoint, and pass the decision in"
    )


def _replayed(failure: BackwardFailure) -> tuple[tuple[Checkpoint, Difference] | None, list[Checkpoint]]:
    seen: list[Checkpoint] = []
    step = failure.replay()
    if step is None:
        return None, seen
    for number in range(_MAX_REPLAYS):
        if time.monotonic() > failure.deadline:
            break
        seen = []
        roots = step.runner.modules if number == 1 else []
        played = step.runner.play(_other_chance(number), _caches_emptied(roots), watch_checkpoints(seen))
        if type(played.error).__name__ != "CheckpointError":
            continue
        for checkpoint in reversed(seen):
            found = difference(checkpoint)
            if found is not None:
                return (checkpoint, found), seen
    return None, seen


@contextlib.contextmanager
def _other_chance(number: int) -> Iterator[None]:
    """Python's and NumPy's random numbers are set back before every replay; let each of them draw others."""
    numpy = sys.modules.get("numpy")
    for _ in range(number):
        random.random()
        if numpy is not None:
            numpy.random.random()
    yield


@contextlib.contextmanager
def _caches_emptied(roots: list[torch.nn.Module]) -> Iterator[None]:
    """Modules that hold no tensors of their own computing: what the first run has put into a cache is in every replay.

    Attributes that are tensors with a graph become None; lists and dicts with such tensors become empty.
    """
    kept: list[tuple[torch.nn.Module, str, Any]] = []
    for module in {id(each): each for root in roots for each in root.modules()}.values():
        for name, value in list(vars(module).items()):
            if name in _OF_MODULES:
                continue
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            if any(isinstance(part, torch.Tensor) and part.grad_fn is not None for part in tuple(parts)):
                kept.append((module, name, value))
                vars(module)[name] = None if isinstance(value, torch.Tensor) else type(value)()
    try:
        yield
    finally:
        for module, name, value in kept:
            vars(module)[name] = value


def _why(found: Difference) -> str:
    return f"in the forward pass it went on with {_said(found.original)}, in backward with {_said(found.again)}"


def _said(ran: Ran | None) -> str:
    if ran is None:
        return "nothing"
    shapes = ", ".join(f"{list(size)} {dtype(kind)}" for size, kind in (ran.outputs or ())[:2])
    line = f" at line {ran.spot.line}" if ran.spot is not None else ""
    return f"`{ran.name}`{line}" + (f", which gave {shapes}" if shapes else "")


def _number(checkpoint: Checkpoint, found: Difference) -> int:
    ran, wanted = (
        (checkpoint.original.ran, found.original) if found.original is not None else (checkpoint.again.ran, found.again)
    )
    return 1 + next((number for number, call in enumerate(ran) if call is wanted), 0)


def _place(draft: Draft, found: Difference) -> None:
    condition = deciding(found)
    if condition is not None:
        draft.at(node_location("cause", *condition, "goes another way the second time"))
    for ran, text in ((found.original, "in the forward pass"), (found.again, "when it is computed again")):
        if ran is not None and ran.spot is not None:
            role = "cause" if condition is None and ran is (found.original or found.again) else "origin"
            draft.at(ran.spot.location(role, f"`{ran.name}` {text}"))  # type: ignore[arg-type]


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
