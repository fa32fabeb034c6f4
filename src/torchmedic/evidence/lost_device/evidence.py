"""Evidence on a device that died under a step: the step's shadow on the CPU, and what it ran into.

The exception comes from wherever the host happened to wait for the device. So the step is run again as a shadow; what
that raises has a live traceback of its own, at the line that is to blame, and the rules for such exceptions read it as
if the device had raised it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from torchmedic.detect.failures.device_errors import DeviceFault, is_sticky
from torchmedic.detect.failures.exceptions import Raised
from torchmedic.detect.failures.kernel_asserts import words_of
from torchmedic.detect.trends.gpu_health import health_facts
from torchmedic.evidence.lost_device.device_progress import Trail, foreign_call, trail_of
from torchmedic.evidence.lost_device.shadow_evidence import ShadowEvidence
from torchmedic.observe.context import StepView
from torchmedic.observe.step.batches import HostBatch
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location
from torchmedic.replay.shadow.cpu_shadow import Seen, Shadow
from torchmedic.replay.shadow.fake_cuda import standing_in
from torchmedic.replay.step.earlier_step import earlier_step
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step, whole_step
from torchmedic.runfolder.gpu import read_gpu_health
from torchmedic.source.live_frames import Frame, Stack, stack_at, stack_of_traceback
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import relative

_PAST_CALLS = 3  # backward calls before the last, whose step may have been the one


class LostDevice:
    """A step whose device is gone. Used as a context: while it is open, modules hold stand-ins, for `replay`.

    The host may have gone on to the next step before it noticed, and some loaders fetch ahead. So the step is run with
    every batch that may have been the one, until one shows what happened.
    """

    def __init__(
        self, incident: Raised, fault: DeviceFault, batches: Sequence[HostBatch], frame: FrameType | None = None
    ) -> None:
        """`frame` is where the loss was noticed, if no exception has come out of the user's code yet."""
        self.incident = incident
        self.step_number, self.rank = incident.step, incident.rank
        self.fault = fault
        self.agent = incident.process
        # The driver reports a failed check of a kernel now and then as a launch failure.
        self.words = words_of(self.agent.run) if fault.kind in ("device_assert", "launch_failure") else []
        self._is_ours = frame is not None
        self._batches = batches
        self.stack: Stack = stack_at(frame) if frame is not None else stack_of_traceback(root_traceback(incident.error))
        self.noticed = _user_frame(self.stack)
        self.step: Step | None = None
        self.shadow = Shadow()
        self.batch: HostBatch | None = None
        self.played: ReplayResult | None = None
        self.why_not = ""
        self._open = contextlib.ExitStack()

    @property
    def is_assertion(self) -> bool:
        """Whether a check inside a kernel failed."""
        return self.fault.kind == "device_assert" or bool(self.words)

    def __enter__(self) -> LostDevice:
        self._open.enter_context(torch.device("cpu"))  # what we make ourselves, whatever the script's default
        self._open.enter_context(standing_in(self.shadow))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def replay(self) -> None:
        """Run the step on the CPU with one batch after the other until one fails; fills `step`, `batch`, `played`."""
        tried: list[tuple[Step, HostBatch | None, ReplayResult]] = []
        for step, batch in self._steps():
            self.shadow.begin(host_originals(batch, self.stack))
            step.runner.shadow = self.shadow
            step.runner.takes_over = True
            played = step.runner.play(backward=False)
            if isinstance(played.error, AssertionError) and not self.shadow.claims_device:
                self.shadow.claims_device = True  # `assert x.is_cuda`
                self.shadow.begin(host_originals(batch, self.stack))
                played = step.runner.play(backward=False)
            tried.append((step, batch, played))
            if self.shadow.failed(played.error) is not None:
                break
        else:
            # No batch fails on its way forward: the present one, all the way.
            if tried:
                step, batch, _ = tried[0]
                self.shadow.begin(host_originals(batch, self.stack))
                tried.append((step, batch, step.runner.play()))
        if tried:
            self.step, self.batch, self.played = tried[-1]
            if self.played.error is not None:
                self.why_not = _stopped(self.played.error)

    def _steps(self) -> Iterator[tuple[Step, HostBatch | None]]:
        for batch in self._batches or (None,):
            try:
                yield whole_step(self.stack, StepView(self.agent, batches=batch)), batch
            except CannotCut as reason:
                self.why_not = str(reason)
                break
        frame = self.stack[0][0] if self.stack else None
        for past in list(reversed(self.agent.kept_backwards.calls))[:_PAST_CALLS]:
            known = any(_is_same(past.batch, batch.whole) for batch in self._batches)
            if past.batch is None or known:
                continue
            with contextlib.suppress(CannotCut):
                yield earlier_step(past, frame, self.agent)[0], past.host_batch

    @property
    def raised(self) -> ShadowEvidence | None:
        """What the shadow raised, as evidence for the rules on exceptions."""
        if self.played is None or self.played.error is None or self.step is None:
            return None
        return ShadowEvidence(self)

    @property
    def trail(self) -> Trail | None:
        """How far the device had come, and what on the way is not torch's own."""
        error = self.played.error if self.played is not None else None
        foreign = foreign_call(error) if error is not None and self.failed is None else None
        finished, unfinished = self.agent.marks.last()
        return trail_of(finished, unfinished, foreign)

    @property
    def health(self) -> list[str]:
        """The driver's facts about the card."""
        return health_facts(read_gpu_health(self.agent.run))

    @property
    def surfaced(self) -> Location | None:
        """Where the host noticed the loss."""
        if self.noticed is None:
            return None
        label = "the device had failed by then" if self._is_ours else "torch reported it here, when it next waited"
        return self.noticed.location("surfaced", label)

    @property
    def how_it_was_run(self) -> str:
        """What the shadow was given in place of what was lost with the device."""
        shadow = self.shadow
        given = ["the batch that the DataLoader yielded" if self.batch is not None else "what the host still has"]
        if shadow.parameters:
            given.append(f"stand-ins for {shadow.parameters} parameters")
        if shadow.others:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in shadow.others[:3])
            given.append(f"stand-ins for data that only the device had ({shapes})")
        return f"the step was run again on the CPU with {' and '.join(given)}"

    @property
    def failed(self) -> Seen | None:
        """The operation that raised in the shadow."""
        return self.shadow.failed(self.played.error) if self.played is not None else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches are made of the same memory."""
    return [tensor.data_ptr() for tensor in tensors_in(one)] == [tensor.data_ptr() for tensor in tensors_in(other)]


def _user_frame(stack: Stack) -> Frame | None:
    for frame, line, _ in stack:
        found = Frame(frame, frame.f_lasti, line)
        if found.is_user:
            return found
    return None


def host_originals(batch: HostBatch | None, stack: Stack) -> dict[int, torch.Tensor]:
    """Host tensors that lost ones were copied from: a batch that was moved before this step's statements began.

    A variable that holds as many tensors as the batch, alike in shape and dtype, holds the batch; a single tensor is
    taken for the only one of the batch that is like it.
    """
    found: dict[int, torch.Tensor] = {}
    hosts = [tensor for tensor in tensors_in(batch.whole) if tensor.device.type == "cpu"] if batch is not None else []
    for frame, _, _ in stack if hosts else ():
        for value in list(frame.f_locals.values()):
            held = tensors_in(value, 3) if isinstance(value, torch.Tensor | list | tuple) or _is_mapping(value) else []
            if len(held) == len(hosts) and all(map(_are_alike, held, hosts)):
                found |= {id(lost): host for lost, host in zip(held, hosts, strict=True) if not lost.is_cpu}
                continue
            for lost in held:
                alike = [host for host in hosts if _are_alike(lost, host)]
                data = not (lost.is_cpu or isinstance(lost, torch.nn.Parameter) or lost.grad_fn is not None)
                if data and len(alike) == 1:
                    found.setdefault(id(lost), alike[0])
    return found


def _are_alike(lost: torch.Tensor, host: torch.Tensor) -> bool:
    return lost.shape == host.shape and lost.dtype == host.dtype


def _is_mapping(value: Any) -> bool:
    return callable(getattr(type(value), "items", None))


def _stopped(error: BaseException) -> str:
    """Why and where a shadow stopped early."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" ({relative(at.tb_frame.f_code.co_filename)}:{at.tb_lineno})" if at is not None else ""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"the replay on the CPU stopped: {text[:200]}{where}"


def root_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of the exception about the device, if the user's code has raised another from it."""
    found = error.__traceback__
    for _ in range(10):
        error_before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if error_before is None or not is_sticky(error_before):
            break
        error, found = error_before, error_before.__traceback__ or found
    return found


def lost_context() -> BaseException | None:
    """What the device says if the CUDA context of this process is gone; asked without waiting for the device."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return error
    return None
