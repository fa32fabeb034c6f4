"""The failing step, ready to be replayed: which frame, which statements, and what to put back first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from torchmedic.observe.frames import is_user_file
from torchmedic.replay.frames import syntax_tree
from torchmedic.replay.runner import Played, Runner
from torchmedic.replay.segment import CannotCut, Segment, cut


class Step:
    """A replayable step."""

    def __init__(self, frame: FrameType, recut: Callable[[ast.Module | None], Segment], runner: Runner) -> None:
        self.frame = frame
        self.segment = runner.segment
        self.runner = runner
        self._recut = recut

    def again(self, tree: ast.Module | None = None) -> Played:
        """Replay plainly, from other syntax if it is given."""
        original = self.runner.segment
        self.runner.segment = self._recut(tree) if tree is not None else original
        try:
            return self.runner.play()
        finally:
            self.runner.segment = original

    def is_faithful(self, played: Played, loss: Sequence[torch.Tensor]) -> bool:
        """Whether the replayed loss equals the original one bit for bit."""
        if not loss or not played.roots:
            return False
        wanted = [tensor.detach() for tensor in loss]
        given = [tensor.detach() for tensor in played.roots[-len(wanted) :]]
        return len(given) == len(wanted) and all(_same_bits(a, b) for a, b in zip(wanted, given, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all().item())


def from_stack(frame: FrameType | None, agent: Any, *, include_failing: bool) -> Step:
    """The step that is running now, seen from inside a hook.

    Raises:
        CannotCut: With the reason.
    """
    stack: list[tuple[FrameType, int]] = []
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _step(stack, agent, include_failing)


def from_traceback(tb: TracebackType | None, agent: Any) -> Step:
    """The step that an exception ended.

    Raises:
        CannotCut: With the reason.
    """
    entries: list[tuple[FrameType, int]] = []
    while tb is not None:
        entries.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    if not entries:
        raise CannotCut("the exception has no frames")
    outer = entries[0][0].f_back
    entries.reverse()
    while outer is not None:
        entries.append((outer, outer.f_lineno))
        outer = outer.f_back
    return _step(entries, agent, True)


def _step(stack: list[tuple[FrameType, int]], agent: Any, include_failing: bool) -> Step:
    """`stack` is innermost first."""
    notes = agent.notes
    for frame, line in stack:
        noted = notes.forward.get(id(frame))
        if noted is not None and noted[0] is frame.f_code:
            return _cut(frame, line, noted[1], agent, include_failing)
    # No module was called: a functional model. The user's innermost frame does both.
    for frame, line in stack:
        if is_user_file(frame.f_code.co_filename):
            return _cut(frame, line, None, agent, include_failing)
    raise CannotCut("no frame of the step is left")


def _cut(frame: FrameType, line: int, forward_line: int | None, agent: Any, include_failing: bool) -> Step:
    def recut(tree: ast.Module | None) -> Segment:
        return cut(frame, line, forward_line, include_failing=include_failing, tree=tree)

    segment = recut(None)
    runner = Runner(
        segment,
        frame,
        agent.notes,
        optimizers=list(agent.clock.optimizers),
        batch=agent.batches.whole,
        target=_loop_target(frame, segment),
    )
    return Step(frame, recut, runner)


def _loop_target(frame: FrameType, segment: Segment) -> ast.expr | None:
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.For) and node.body and node.body[0].lineno == segment.lines[0]:
            return node.target
    return None
