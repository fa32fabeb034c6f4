"""A backward pass begins and ends."""

from __future__ import annotations

import contextlib
import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.autograd

from torchmedic.contained import contained, is_below_compiled
from torchmedic.observe.device.hidden_work import dispatch_modes, function_modes, is_profiling
from torchmedic.observe.failures import exceptions
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.patches import compiler, is_traced, leave_to_python, without_our_frame, wrap
from torchmedic.observe.numbers.finite_checks import are_plain, in_functorch
from torchmedic.observe.numbers.func_losses import func_loss, set_aside
from torchmedic.observe.step.clock import BACKWARD


class BackwardHooks:
    """Wraps the function that `Tensor.backward`, `autograd.backward`, `autograd.grad` and `func.grad` all call."""

    def __init__(self, step: Step, forward: ForwardHooks) -> None:
        self._step = step
        self._forward = forward

    def install(self) -> None:
        wrap(torch.autograd, "_engine_run_backward", self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        step = self._step
        clock, finite, fast = step.clock, step.finite, step.fast
        glance, hold = finite.losses.glances.look, finite.losses.hold
        for each in (glance, is_below_compiled):
            leave_to_python(each)

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or compiler._is_compiling_flag:
                return original(*args, **kwargs)  # traced, not run
            if (thread := get_ident()) != step.thread:
                step.trains_in(thread)
            accumulates = kwargs.get("accumulate_grad")
            if accumulates:
                if len(args) > 3 and args[3] and step.leaks is not None:
                    step.leaks.cycles.made(sys._getframe(1))
                if (collectives := step.collectives) is not None and collectives.reducing is not None:
                    collectives.backward_begins()
            roots = args[0] if args else kwargs.get("t_outputs", ())
            is_quick = False
            # What follows runs in nearly every step of a run of very short ones: no function of ours but `glance`, and
            # few of torch's, which are not in the caches either. `backward()` cannot run inside of `torch.func`.
            if fast.on and not (
                step.backward_depth
                or dispatch_modes()
                or function_modes()
                or is_profiling()
                or (not accumulates and in_functorch())
                or (fast.is_late and is_below_compiled())  # a late loss takes more functions
            ):
                try:
                    is_quick = hold(roots, clock.step, finite.steps) if fast.is_late else glance(roots)
                except Exception as error:
                    step.numbers_failed(error, sys._getframe())
            if is_quick:
                step.backward_depth = 1
            else:
                fast.on = False
                self._begins(roots)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                without_our_frame(error)
                raise
            if is_quick:
                step.backward_depth = 0
                clock.micro_step += 1
            else:
                self._ends(result)
            return result

        return _engine_run_backward

    @contained("observe.backward")
    def _begins(self, roots: Any) -> None:
        step = self._step
        if step.paused:
            return
        step.backward_depth += 1
        if step.backward_depth != 1:
            return
        frame = sys._getframe(1)
        if step.is_sampled_out:
            if step.habits.awake:
                step.habits.backward_begins(roots, frame)
            if are_plain():
                try:
                    step.short_steps.backward_begins(roots)
                except Exception as error:
                    step.numbers_failed(error, frame)
            return
        exceptions.training_goes_on()
        clock = step.clock
        clock.enter(BACKWARD, frame)
        if step.checkup is not None and step.checkup.on:
            has_optimizers = clock.optimizer_count > 0
            step.check_up(step.checkup.backward_begins, roots, (clock.file, clock.line), frame, has_optimizers)
        if step.habits.awake:
            step.habits.backward_begins(roots, frame)
        if step.finite.on and are_plain():
            try:
                has_optimizers = clock.optimizer_count > 0
                place = (clock.file, clock.line)
                step.finite.backward_begins(roots, place, frame, step.stepping, has_optimizers=has_optimizers)
            except Exception as error:
                step.numbers_failed(error, frame)
        elif step.finite.on and not clock.optimizer_count and (loss := func_loss(roots, frame)) is not None:
            try:
                with set_aside():
                    place = (clock.file, clock.line)
                    step.finite.backward_begins(loss.roots, place, frame, has_optimizers=False, leaves=loss.leaves)
            except Exception as error:
                step.numbers_failed(error, frame)

    @contained("observe.backward")
    def _ends(self, result: Any) -> None:
        step = self._step
        if step.paused:
            return
        # A backward that raised leaves the depth up; a loop that survives it is set right by the next optimizer step.
        step.backward_depth = max(0, step.backward_depth - 1)
        if step.backward_depth:
            return
        clock = step.clock
        clock.backward_done()
        if clock.is_by_hand and step.leaks is not None and clock.step >= step.leaks.due:
            step.leaks.stepped(clock.step, sys._getframe(1))
        is_bad = step.finite.losses.last_is_bad
        if step.is_sampled_out and step.stepping is None and not is_bad and not step.habits.awake:
            return
        clock.leave()
        if step.habits.awake:
            step.habits.backward_ended()
        self._forward.expect()
        self._look(sys._getframe(1), result)

    def _look(self, frame: FrameType, result: Any) -> None:
        """Look at the gradients that the backward has left."""
        step = self._step
        if step.finite.on:
            try:
                with set_aside() if in_functorch() else contextlib.nullcontext():
                    step.finite.backward_ended(frame, step.clock, step.stepping)
            except Exception as error:
                step.numbers_failed(error, frame)
        if step.checkup is not None and step.checkup.on and not step.checkup.rests:
            step.check_up(step.checkup.backward_ended, frame, step.clock.optimizer_count > 0, result)
