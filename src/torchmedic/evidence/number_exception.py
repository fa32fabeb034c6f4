"""An exception that only complains of NaN or infinity: the step behind it, replayed to where the number was born."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

from torchmedic.detect.failures.nonfinite import NonFinite
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.numbers import NumbersEvidence, Victim
from torchmedic.observe.context import StepContext
from torchmedic.observe.step.items import as_tuple
from torchmedic.observe.step.tensors import parameters_of, tensors_in
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step, from_stack, through_backward
from torchmedic.replay.trace.bad_value_origins import Birth, is_deliberate
from torchmedic.replay.trace.microscope import Microscope, Value
from torchmedic.source.live_frames import Frame, stack_at, stack_of
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.syntax import has_line, is_module, nodes_in
from torchmedic.source.user_code import relative

# What messages about bad numbers have in common; whether there is one is then looked up among the live values.
_WORDS = re.compile(
    r"\bnan\b|\binf\b|infinit|non-?finite|not finite|isfinite|real\(\)|constraint|probability tensor|converge"
    r"|between 0 and 1|positive-definite|singular|diverge|explod|returned nan|greaterthan|simplex|stopping training",
    re.I,
)
_GROWN = 10.0  # times its smallest value: a loss that has run away
_FAR_WEIGHTS = 3.0  # times their own size: how far updates that went wrong take the weights
_ASKING = re.compile(r"isnan|isfinite|isinf|\bnan\b|\binf\b|finite", re.I)


def complains_of_number(evidence: RaisedEvidence) -> bool:
    """Whether an exception is about a number that is not finite: it says so, and there is one."""
    frame = evidence.user_frame
    if frame is None or evidence.is_traced:
        return False
    if isinstance(evidence.error, OverflowError) and _has_grown(evidence):
        return True  # `math.exp(loss)`: the number is finite, and much too large
    if not (_WORDS.search(evidence.message) or (_ASKING.search(_condition(frame)) and _is_own(evidence, frame))):
        return False
    below = [frame, *evidence.library_frames]
    return any(_is_bad(value) for part in below for value in list(part.variables.values())) or _bad_gradient(evidence)


def follows_runaway(evidence: RaisedEvidence) -> bool:
    """Whether an exception is about a value outside of its domain, and the updates took the weights far away.

    The value may be finite: the exponential of a large negative number is 0.
    """
    copy = evidence.incident.process.finite.memory.oldest_copy()
    is_asked = copy is not None and not evidence.is_traced and _WORDS.search(evidence.message) is not None
    return is_asked and copy is not None and copy.distance() >= _FAR_WEIGHTS


def _has_grown(evidence: RaisedEvidence) -> bool:
    """Whether a loss of the last steps is many times what it was."""
    watch = evidence.incident.process.finite
    losses = [abs(loss) for loss in watch.losses.recent]
    return len(losses) > 1 and max(losses) > _GROWN * max(min(losses), 1e-12)


def asks_about_number(frame: Frame) -> bool:
    """Whether a frame has just found a number that is not finite, and acts on it."""
    asked = _ASKING.search(_condition(frame)) is not None
    return asked and any(_is_bad(value) for value in list(frame.variables.values()))


def _is_bad(value: Any) -> bool:
    """A plain infinity is where many a `best_loss` starts from; a plain NaN is nobody's start."""
    return math.isnan(value) if isinstance(value, float) else is_bad(value)


def _is_own(evidence: RaisedEvidence, frame: Frame) -> bool:
    """Raised by the user's own `raise` or `assert`."""
    return isinstance(frame.statement, ast.Raise | ast.Assert) and not evidence.library_frames


def _condition(frame: Frame) -> str:
    """The test of the `assert`, or of the `if`s around a statement."""
    statement = frame.statement
    if isinstance(statement, ast.Assert):
        return ast.unparse(statement.test)
    around = (node for node in nodes_in(frame.tree) if isinstance(node, ast.If) and has_line(node, frame.line))
    return " ".join(ast.unparse(node.test) for node in around)


def _bad_gradient(evidence: RaisedEvidence) -> bool:
    optimizers = evidence.incident.process.clock.optimizers
    return any(
        is_bad(tensor.grad)
        for tensor in parameters_of(*optimizers)
        if tensor.grad is not None and tensor.grad.layout is torch.strided
    )


class EchoEvidence(NumbersEvidence):
    """What the rules on numbers look at when an exception, or an exit, was the first to notice."""

    def __init__(
        self,
        agent: StepContext,
        frames: list[Frame],
        noticed: Frame | None,
        step: Step | None,
        why_not: str,
        *,
        error: BaseException | None = None,
        through: Step | None = None,
    ) -> None:
        """Store what is known before a replay; see `NumbersEvidence`.

        Args:
            agent: What was noted of the step.
            frames: The stack, outermost first.
            noticed: The user's frame that complained.
            step: The step up to the complaint.
            why_not: Why there is no step.
            error: The exception; None for an exit.
            through: The step as far as it would have gone backward.
        """
        super().__init__(_incident(agent), agent, frames, noticed, step, why_not=why_not)
        self._error = error
        self._through = through
        self._name = ""  # of the variable that is bad, filled by `replay`
        self._is_root_bad = True  # a loss that backward was called with is bad

    @classmethod
    def of_exception(cls, raised: RaisedEvidence) -> EchoEvidence:
        agent = raised.incident.process
        step, why_not = _cut(raised.failing_step)
        through = _cut(raised.step_through_backward)[0] if step is not None else None
        return cls(agent, raised.frames, raised.user_frame, step, why_not, error=raised.error, through=through)

    @classmethod
    def of_exit(cls, frame: FrameType, agent: StepContext) -> EchoEvidence:
        frames = stack_of(frame)
        noticed = next((part for part in reversed(frames) if part.is_user), None)
        step, why_not = _cut(lambda: from_stack(frame, agent, include_failing=False))
        through = _cut(lambda: through_backward(stack_at(frame), agent))[0] if step is not None else None
        return cls(agent, frames, noticed, step, why_not, through=through)

    @property
    def complaint(self) -> str:
        at = f" at {relative(self.noticed.file)}:{self.noticed.line}" if self.noticed is not None else ""
        if self._error is None:
            return f"the script gave up{at} because of it"
        text = str(self._error).strip().splitlines()
        return f"{type(self._error).__name__}{at}: {text[0][:120] if text else 'no message'}"

    @property
    def victim_name(self) -> str:
        if not self.loss_is_bad:
            return ""
        if "loss" in self._name.lower() or (not self._name and self._is_root_bad):
            return "the loss"
        return f"`{self._name}`" if self._name else "a value"  # a metric or an environment may be all that met it

    @property
    def trial_step(self) -> Step | None:
        return self._through or self.step

    def _find_births(self, scope: Microscope, targets: list[tuple[Victim, list[Value]]]) -> tuple[Victim, list[Birth]]:
        """Leave out masks: variables around the complaint may hold infinities on purpose."""
        victim, found = super()._find_births(scope, targets)
        return victim, [each for each in found if each.kind == "nan" or each.spoiled or not is_deliberate(each)]

    def _is_expected(self, error: BaseException) -> bool:
        return self._error is not None and type(error) is type(self._error)

    def _is_faithful(self, played: ReplayResult) -> bool | None:
        same = played.error is not None and str(played.error) == str(self._error)
        return True if same else None

    def _find_targets(self, scope: Microscope, played: ReplayResult) -> list[tuple[Victim, list[Value]]]:
        near = _tensors_below(played.error.__traceback__ if played.error is not None else None)
        around = {name: value for name, value in played.namespace.items() if not name.startswith("__")}
        variables = list(_tensors_named(around))
        # The variable that was assigned last is the nearest to the line that complains.
        self._name = next((name for name, tensor in reversed(variables) if is_bad(tensor)), "")
        self._is_root_bad = any(is_bad(root) for root in played.roots)
        if not self._name and not self._is_root_bad:
            self._name = next((name for name, tensor in near[::-1] if is_bad(tensor)), "")
        gradients: tuple[Victim, list[Value]] = ("gradient", [value for _, value in scope.gradients])
        values: list[tuple[Victim, list[Value]]] = [
            ("loss", [scope.value_of(tensor) for _, tensor in near]),
            ("loss", [scope.value_of(root) for root in played.roots]),
        ]
        last: tuple[Victim, list[Value]] = ("loss", [scope.value_of(tensor) for _, tensor in variables])
        of_gradients = "gradient" in str(self._error).lower()
        return [gradients, *values, last] if of_gradients else [*values, gradients, last]


def _cut(make: Callable[[], Step]) -> tuple[Step | None, str]:
    """A step, or the reason why it cannot be cut out of its frame."""
    try:
        return make(), ""
    except CannotCut as reason:
        return None, str(reason)


def _incident(agent: StepContext) -> NonFinite:
    watch = agent.finite
    return NonFinite(
        quantity="loss",
        stage="backward",
        step=agent.clock.step,
        rank=agent.rank,
        optimizers=tuple(agent.clock.optimizers),
        stepping=None,
        bad=(),
        damaged=(),
        batch_indices=as_tuple(agent.batches.indices),
        losses=tuple(watch.losses.recent),
    )


def _tensors_below(tb: TracebackType | None) -> list[tuple[str, torch.Tensor]]:
    """The tensors in the frames of a replay that ended in an exception, the innermost first; not the segment's own."""
    frames = []
    while tb is not None:
        frames.append(tb.tb_frame)
        tb = tb.tb_next
    found: list[tuple[str, torch.Tensor]] = []
    for frame in reversed(frames[2:]):
        if not is_module(frame.f_code):
            found += _tensors_named(dict(frame.f_locals))
    return found


def _tensors_named(values: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, value in values.items()
        for tensor in tensors_in(value, 2)
        if tensor.is_floating_point() and tensor.layout is torch.strided
    ]
