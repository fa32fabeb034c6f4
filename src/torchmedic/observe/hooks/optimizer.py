"""An optimizer is built, clears gradients, and updates the weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch._C._autograd import _get_sequence_nr as get_sequence_number
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchmedic.contained import contained, is_below_compiled
from torchmedic.observe.device.hidden_work import dispatch_modes, function_modes, is_profiling
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks
from torchmedic.observe.hooks.patches import compiler, is_traced, leave_to_python, without_our_frame, wrap
from torchmedic.observe.numbers.finite_checks import in_functorch, is_fine
from torchmedic.observe.step.clock import OPTIMIZER
from torchmedic.source.lookup.optimizers import construction
from torchmedic.source.user_code import user_frame


class OptimizerHooks:
    """Wraps `torch.optim.Optimizer`, the base of all optimizers."""

    def __init__(self, step: Step, forward: ForwardHooks) -> None:
        self._step = step
        self._forward = forward
        self._handles: list[Any] = []
        self._fast = step.fast

    def install(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._on_begin()))
        self._handles.append(register_optimizer_step_post_hook(self._on_end()))
        wrap(Optimizer, "_patch_step_function", self._around_build)
        wrap(Optimizer, "zero_grad", self._around_zero_grad)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _around_build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> Any:
            result = original(optimizer)
            self._built(optimizer)
            return result

        return _patch_step_function

    @contained("observe.optimizer")
    def _built(self, optimizer: Any) -> None:
        step = self._step
        step.fast.leave()
        self._forward.expect()
        step.clock.optimizer_built(optimizer, construction(sys._getframe(1), type(optimizer)))
        step.habits.optimizer_built(optimizer, sys._getframe(1))
        step.notes.optimizer_built()
        if step.leaks is not None:
            step.leaks.mark("trial", sys._getframe(1))
        step.begins(user_frame(sys._getframe(1)))  # the first step of a loop that has no loader begins about here

    def _around_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        step, fast = self._step, self._fast

        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or compiler._is_compiling_flag or fast.on:
                return original(optimizer, *args, **kwargs)
            listening = step.habits.awake and not step.paused
            if listening:
                step.habits.zero_begins(optimizer, sys._getframe(1))
            try:
                result = original(optimizer, *args, **kwargs)
            except BaseException as error:
                without_our_frame(error)
                raise
            if listening:
                step.habits.zero_ended(optimizer)
            self._gradients_cleared()
            return result

        return zero_grad

    @contained("observe.zero_grad")
    def _gradients_cleared(self) -> None:
        step = self._step
        if step.paused:
            return
        step.finite.cleared()
        if step.is_sampled_out:
            return
        if step.clock.micro_step == 0 and step.notes.is_fresh():
            step.opens(user_frame(sys._getframe(1)))  # many loops open with it, and some have no loader
        self._forward.expect()

    # Both hooks run in every step, with cold caches: what they need of other objects is looked up once, here.

    def _on_begin(self) -> Callable[[Any, Any, Any], None]:
        step, fast, note = self._step, self._fast, self._note_begin
        clock, finite, late = step.clock, step.finite, step.finite.losses.late
        leave_to_python(is_fine)

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced() or compiler._is_compiling_flag:
                return
            if fast.on:
                if clock.step >= fast.until or id(optimizer) != fast.optimizer or kwargs or len(args) > 1:
                    pass  # somebody waits for this step, or it has a closure
                elif fast.is_late and late.held:  # nothing can be known now, and nothing is asked
                    finite.steps += 1
                    fast.has_begun = True
                    return
                elif not function_modes():
                    try:
                        plain = fast.witness.plain is not None  # read without an operation, which nobody can see
                        computes = not (
                            plain or in_functorch() or dispatch_modes() or is_profiling() or is_below_compiled()
                        )
                        if is_fine(optimizer, fast.witness, computes=computes):
                            finite.steps += 1
                            fast.has_begun = True
                            return
                    except Exception as error:
                        step.numbers_failed(error, sys._getframe())
                fast.on = False
            note(optimizer, args, kwargs)

        leave_to_python(begins)
        return begins

    def _on_end(self) -> Callable[[Any, Any, Any], None]:
        fast, clock, notes, note = self._fast, self._step.clock, self._step.notes, self.note_end

        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_traced() or compiler._is_compiling_flag:
                return
            if fast.on:
                clock.step += 1
                clock.micro_step = 0
                notes.sequence_number = get_sequence_number()
            else:
                note(optimizer, stepped=True)

        leave_to_python(ends)
        return ends

    @contained("observe.optimizer")
    def _note_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._step
        if step.paused:
            return
        step.fast.leave()
        step.backward_depth = 0
        step.fast.has_begun = True
        step.stepping = optimizer
        frame = sys._getframe(1)
        if step.ranks is not None and step.ranks.begins:
            step.ranks.step_begins(optimizer, frame)
        if not step.is_sampled_out:
            step.clock.enter(OPTIMIZER, frame)
            if step.checkup is not None and step.checkup.on:
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
                step.check_up(step.checkup.step_begins, optimizer, callable(closure))
        if step.habits.awake:
            step.habits.step_begins(optimizer, frame)
        finite = step.finite
        if finite.on:
            try:
                if step.is_sampled_out and finite.is_calm and finite.glance_at_gradients(optimizer, frame):
                    if step.clock.step >= step.curves.due and not finite.losses.late.are_usual:
                        step.curves.note(step.clock.step, optimizer, finite)
                    return
                finite.step_begins(optimizer, frame, lambda: step.clock.optimizers)
                if step.clock.step >= step.curves.due or finite.is_rising:
                    step.curves.note(step.clock.step, optimizer, finite)
            except Exception as error:
                step.numbers_failed(error, frame)

    @contained("observe.optimizer")
    def note_end(self, optimizer: Any, *, stepped: bool) -> None:
        """An update is over, or was left out."""
        step = self._step
        if step.paused:
            return
        step.fast.leave()
        step.stepping = None
        if stepped and step.finite.wants_weights and step.finite.on:
            try:
                step.finite.step_ended(optimizer, sys._getframe(1))
            except Exception as error:
                step.numbers_failed(error, sys._getframe(1))
        if stepped and step.ranks is not None:
            step.ranks.updates += 1
            if step.ranks.updates >= step.ranks.due:
                step.ranks.stepped()
        clock = step.clock
        clock.optimizer_stepped(optimizer)
        if step.leaks is not None and clock.step >= step.leaks.due:
            step.leaks.stepped(clock.step, sys._getframe(1))
        standstill = step.habits.standstill
        if stepped and clock.step >= standstill.due:
            standstill.stepped(optimizer, clock.step)
        if step.habits.awake:
            step.habits.step_ended(optimizer, stepped=stepped)
        step.is_sampled_out = not step.habits.awake and step.short_steps.applies()
        if step.is_sampled_out:
            step.notes.forget()
            self._forward.rest()
            step.fast.begin(optimizer)
            return
        clock.leave()
        if step.checkup is not None and step.checkup.on:
            step.check_up(step.checkup.step_ended, sys._getframe(1))
        step.is_over(sys._getframe(1))
        self._forward.expect()
