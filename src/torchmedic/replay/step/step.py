"""The failing step, ready to be replayed: which frame, which statements, and what to put back first."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

import torch

from torchmedic.observe.context import StepContext
from torchmedic.observe.step.trainers import others_train
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.step_frames import forward_lines, refuse_launchers
from torchmedic.source.live_frames import Stack, point_of, stack_at, stack_of_traceback
from torchmedic.source.lookup.origins import CALLING
from torchmedic.source.segment.cut import CannotCut, Segment, cut, loops_around, turn_around
from torchmedic.source.syntax import is_module, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file


class Step:
    """A replayable step."""

    def __init__(self, frame: FrameType, recut: Callable[[ast.Module | None], Segment], runner: Runner) -> None:
        self.frame = frame
        self.segment = runner.segment
        self.runner = runner
        self.last_part: Step | None = None  # what the innermost function does, where a caller of it began the step
        self._recut = recut

    def run_by(self, runner: Runner) -> Step:
        """The step with another runner."""
        return Step(self.frame, self._recut, runner)

    def again(self, tree: ast.Module | None = None, *, keep_graphs: bool = True) -> ReplayResult:
        """Replay plainly, from other syntax if it is given."""
        original = self.runner.segment
        self.runner.segment = self._recut(tree) if tree is not None else original
        try:
            return self.runner.play(keep_graphs=keep_graphs)
        finally:
            self.runner.segment = original

    def settle(self, loss: Sequence[torch.Tensor]) -> bool:
        """Make the replay the same as the original if need be by taking over what it drew at random.

        Returns:
            Whether the replayed loss now equals the original one bit for bit.
        """
        played = self.runner.play()
        if self.is_faithful(played, loss):
            return True
        if played.drew_random:
            self.runner.frozen = played.drew_random
            if self.is_faithful(self.runner.play(), loss):
                return True
            self.runner.frozen = set()
        return False

    def is_faithful(self, played: ReplayResult, loss: Sequence[torch.Tensor], rounding: int = 0) -> bool:
        """Whether the replayed loss equals the original one: bit for bit, or up to so many units of the last place."""
        if not loss or not played.roots:
            return False
        wanted = [tensor.detach() for tensor in loss]
        given = [tensor.detach() for tensor in played.roots[-len(wanted) :]]
        return len(given) == len(wanted) and all(_same_bits(a, b, rounding) for a, b in zip(wanted, given, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor, rounding: int) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = (a == b) | (a.isnan() & b.isnan())
    if rounding and a.is_floating_point():
        same |= (a - b).abs() <= rounding * torch.finfo(a.dtype).eps * a.abs()
    return bool(same.all().item())


def from_stack(frame: FrameType | None, agent: StepContext, *, include_failing: bool, outwards: int = 0) -> Step:
    """The step that is running now, seen from inside a hook; `outwards` as in `from_traceback`."""
    stack = stack_at(frame)
    step = _step(stack, agent, include_failing, outwards)
    inner = next((each for each in stack if is_user_file(each[0].f_code.co_filename)), None)
    if inner is not None and inner[0] is not step.frame:
        with contextlib.suppress(CannotCut):
            step.last_part = _cut(inner[0], inner[1:], None, agent, include_failing)
    return step


def from_traceback(
    tb: TracebackType | None, agent: StepContext, *, within: FrameType | None = None, outwards: int = 0
) -> Step:
    """The step that an exception ended.

    Args:
        tb: Its traceback.
        agent: What was noted of the step.
        within: The frame of torch's that the step was in, where user code below it (a hook, the backward of a custom
            Function) is no part of the step's own statements.
        outwards: How many loops to go out of: those of the step's own function, then those of its callers.
    """
    stack = stack_of_traceback(tb, within)
    if not stack:
        raise CannotCut("the exception has no frames")
    return _step(stack, agent, True, outwards)


def whole_step(stack: Stack, agent: StepContext) -> Step:
    """The step that was under way, from its beginning through its backward, wherever in it the stack is.

    A device is behind its host: what it fails at may stand before or behind the line at which the host notices. Where
    backward is not called from any of the frames, the step ends with the later of that line and the forward pass.
    """
    refuse_launchers(stack)
    try:
        return through_backward(stack, agent)
    except CannotCut:
        pass
    noted = forward_lines(stack, agent)
    for frame, line, column in stack:
        forward = noted.get(frame)
        if forward is not None:
            to_forward = (forward, None)
            step = _cut(frame, to_forward if forward > line else (line, column), forward, agent, True)
            if step.segment.lines[0] > forward:  # an inner loop, which the forward pass stands before
                step = _cut(frame, to_forward, forward, agent, True)
            return step
    return _step(stack, agent, True)


def _step(stack: Stack, agent: StepContext, include_failing: bool, outwards: int = 0) -> Step:
    """Cut the step at the innermost frame that can be cut; `stack` is innermost first."""
    refuse_launchers(stack)
    noted = forward_lines(stack, agent)
    # A lambda or comprehension is a part of a statement of the frame around it.
    stack = [each for each in stack if is_module(each[0].f_code) or each[0].f_code.co_name[0] != "<"]
    is_caller = False
    for number, (frame, line, column) in enumerate(stack):
        forward = noted.get(frame)
        if forward is not None:
            loops = loops_around(frame, line)
            if is_caller and not loops and not any(loops_around(outer, at) for outer, at, _ in stack[number:]):
                break  # to run a caller from its beginning would be to train again
            if outwards <= loops or is_module(frame.f_code):
                return _cut(frame, (line, column), forward, agent, include_failing, outwards=outwards)
            outwards -= loops + 1
            is_caller = True
    if is_caller:
        raise CannotCut("no loop is left to go out of")
    # No module was called: a functional model. The user's innermost frame does both.
    for frame, line, column in stack:
        if is_user_file(frame.f_code.co_filename):
            if outwards and outwards >= loops_around(frame, line) + (not is_module(frame.f_code)):
                raise CannotCut("no loop is left to go out of")
            return _cut(frame, (line, column), None, agent, include_failing, outwards=outwards)
    raise CannotCut("no frame of the step is left")


def through_backward(stack: Stack, agent: StepContext, *, by_library: bool = False) -> Step:
    """The step as far as its backward, cut at the innermost frame that can be cut: it gets there once it is cured.

    Args:
        stack: Innermost first: of what is running, or of the exception that ended the step.
        agent: What was noted of the step.
        by_library: Whether a library has called the model and goes backward, both from the same function.
    """
    why = CannotCut("there are no frames")
    noted = forward_lines(stack, agent) if by_library else {}
    for frame, line, column in stack:
        if frame in noted if by_library else is_user_file(frame.f_code.co_filename):
            try:
                return _cut(frame, (line, column), noted.get(frame), agent, True, through=True)
            except CannotCut as reason:
                why = reason
    raise why


def through_returned_loss(stack: Stack, agent: StepContext) -> Step:
    """The step of a function that returns its loss to a library, which calls backward: a `training_step`."""
    why = CannotCut("no function returns a loss to a library")
    for (frame, line, column), (caller, _, _) in itertools.pairwise(stack):
        by_library = not is_user_file(caller.f_code.co_filename) and caller.f_code.co_name not in CALLING
        if by_library and is_user_file(frame.f_code.co_filename) and not is_module(frame.f_code):
            try:
                return _cut(frame, (line, column), None, agent, True, gives_loss=True)
            except CannotCut as reason:
                why = reason
    raise why


def earlier(
    frame: FrameType,
    lasti: int,
    forward_line: int | None,
    agent: StepContext,
    kind: Callable[..., Runner],
    *,
    include_failing: bool = True,
    whole_turn: bool = False,
) -> Step:
    """A step that is over, cut to the call that a frame was at.

    Args:
        frame: Of the same code as the one that ran it.
        lasti: The instruction of the call.
        forward_line: The line at the forward pass.
        agent: What was noted of that step.
        kind: Makes the runner.
        include_failing: Whether the call belongs to the step (`backward()` does, `optimizer.step()` does not).
        whole_turn: Whether the step goes on behind the call, to the end of the loop's body.
    """
    point = point_of(frame, lasti, frame.f_lineno)
    if whole_turn:
        last = turn_around(frame, point[0])[-1:]
        if not last:
            raise CannotCut("there is no loop around the update")
        point = (last[0].lineno, None)  # of a loop or a `with`, its header stands for all of it
    return _cut(frame, point, forward_line, agent, include_failing, kind=kind)


def whole_turn(frame: FrameType | None, agent: StepContext) -> Step:
    """The present turn of the innermost loop, to its end: what follows the update belongs to it."""
    for live, line, _ in stack_at(frame):
        if is_user_file(live.f_code.co_filename) and loops_around(live, line):
            return _cut(live, (turn_around(live, line)[-1].lineno, None), None, agent, True)
    raise CannotCut("there is no loop around the update")


def _cut(
    frame: FrameType,
    point: tuple[int, int | None],
    forward_line: int | None,
    agent: StepContext,
    include_failing: bool,
    *,
    through: bool = False,
    gives_loss: bool = False,
    outwards: int = 0,
    kind: Callable[..., Runner] = Runner,
) -> Step:
    def recut(tree: ast.Module | None) -> Segment:
        column = point[1] if tree is None else _moved_column(frame, point, tree)
        return cut(
            frame,
            point[0],
            forward_line,
            column=column,
            include_failing=include_failing,
            through_backward=through,
            gives_loss=gives_loss,
            outwards=outwards,
            tree=tree,
        )

    if others_train():
        raise CannotCut("another thread trains at the same time")
    segment = recut(None)
    runner = kind(
        segment,
        frame,
        agent.notes,
        optimizers=list(agent.clock.optimizers),
        batch=agent.batches.whole,
        target=_loop_target(frame, segment),
        usual_step=agent.clock.usual_step,
    )
    return Step(frame, recut, runner)


def _moved_column(frame: FrameType, point: tuple[int, int | None], tree: ast.Module) -> int | None:
    """The column of the failing statement after an edit, which may have moved it on its line."""
    line, column = point
    before = _starts(syntax_tree(frame.f_code.co_filename, frame.f_globals), line)
    after = _starts(tree, line)
    if column is None or not before or not after:
        return None
    behind = sum(start > column for start in before)
    return after[max(0, len(after) - 1 - behind)]


def _starts(tree: ast.Module | None, line: int) -> list[int]:
    nodes = nodes_in(tree)
    return sorted({node.col_offset for node in nodes if isinstance(node, ast.stmt) and node.lineno == line})


def _loop_target(frame: FrameType, segment: Segment) -> ast.expr | None:
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    for node in nodes_in(tree):
        if isinstance(node, ast.For) and node.body and node.body[0].lineno == segment.lines[0]:
            return node.target
    return None
