"""The places in torch where training can be seen to move, and what is noted there.

Each patch calls torch's own function exactly once, with the same arguments, and passes on what it returns or raises.
Only what stands around that call is ours, and that is contained. Patches are made once, on classes and modules of
torch, never on the user's objects: a hook on a model would be pickled with it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.autograd
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from torchmedic.contained import contained, report_fault
from torchmedic.observe import endings
from torchmedic.observe.batches import Batches
from torchmedic.observe.checkup import Checkup
from torchmedic.observe.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, Clock
from torchmedic.observe.economy import Economy
from torchmedic.observe.finite import FiniteWatch
from torchmedic.observe.frames import is_user_file, user_frame
from torchmedic.observe.habits import Habits
from torchmedic.observe.late import is_device_error
from torchmedic.observe.leaks import LeakWatch
from torchmedic.observe.notes import StepNotes
from torchmedic.observe.rewind import Rewind

# Code of ours that torch.compile may come upon. Never compiled by itself; where it is inlined, `is_compiling` is true.
_entries: list[CodeType] = []
_patched: list[tuple[Any, str, Any]] = []
_SURE = 8  # steps in a row that tell how a loop is built
_OUR_HOOK = -7001  # keys of torch's own count up from 0


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LOADING = os.path.dirname(os.path.abspath(dataloader.__file__)) + os.sep


class Hooks:
    """Feeds the clock, the batches, the notes for a replay and the watch over NaN from torch."""

    def __init__(
        self,
        clock: Clock,
        batches: Batches,
        notes: StepNotes,
        finite: FiniteWatch,
        rewind: Rewind,
        habits: Habits,
    ) -> None:
        self._clock = clock
        self._batches = batches
        self._notes = notes
        self._finite = finite
        self._rewind = rewind
        self._habits = habits
        self.checkup: Checkup | None = None
        self.leaks: LeakWatch | None = None
        self.paused = False  # while a replay runs, which is not training
        self._backward_depth = 0
        self._noting = False
        self._forward_expected = False
        self._compiled_watched = False
        self._handles: list[Any] = []
        self._step_skipped = False
        self._is_opened = False  # since the last update something was seen to begin the step
        self._opened_by_others = 0  # steps in a row that were
        self._stepping: Any = None  # the optimizer whose step is under way
        self._economy = Economy(clock, batches, notes, finite)
        self._thin = False  # this step is not noted in full

    def install(self) -> None:
        """Put every hook in place; one that cannot be leaves the others working."""
        for place in (
            self._watch_data,
            self._watch_backward,
            self._watch_optimizers,
            self._watch_scaler,
        ):
            contained("observe.install")(place)()
        self._noting = False
        self._trust_notes()
        self._finite.on = False
        self._trust_numbers()

    # Two parts of many hooks, each with a switch of its own: to contain them call by call would cost more than they do.

    @contained("observe.notes")
    def _trust_notes(self) -> None:
        self._noting = True

    @contained("observe.finite")
    def _trust_numbers(self) -> None:
        self._finite.on = True

    def _notes_failed(self, error: Exception) -> None:
        self._noting = False
        report_fault("observe.notes", error)

    def _numbers_failed(self, error: Exception, frame: FrameType) -> None:
        self._finite.on = False
        if is_device_error(error):
            self._finite.device_failed(error, frame)
        else:
            report_fault("observe.finite", error)

    def _check_up(self, event: str, *facts: Any) -> None:
        try:
            getattr(self.checkup, event)(*facts)
        except Exception as error:
            if self.checkup is not None:
                self.checkup.stop()
            if is_device_error(error):
                self._finite.device_failed(error, sys._getframe(2))
            else:
                report_fault("observe.checkup", error)

    def remove(self) -> None:
        """Leave torch as it was; `install` puts everything back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget_forward()
        self._compiled_watched = False
        for owner, name, original in reversed(_patched):
            setattr(owner, name, original)
        _patched.clear()

    # Data

    def _watch_data(self) -> None:
        iterator = dataloader._BaseDataLoaderIter
        _wrap(iterator, "__next__", self._around_next)
        _wrap(iterator, "_next_index", self._around_next_index)

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            self._data_requested(iterator)
            try:
                batch = original(iterator)
            except BaseException:
                self._data_failed(iterator)
                raise
            self._data_arrived(iterator, batch)
            return batch

        return __next__

    def _around_next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.batches")(self._batches.index_drawn)

        @functools.wraps(original)
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            note(iterator, index)
            return index

        return _next_index

    @contained("observe.data")
    def _data_requested(self, iterator: Any) -> None:
        if self.paused:
            return
        if self.leaks is not None and iterator._num_yielded == 0:
            self.leaks.loading(iterator, sys._getframe(1))
        if self._thin:
            self._economy.data_requested(iterator)
            return
        self._clock.data_requested()
        self._clock.enter(DATA, sys._getframe(1))
        self._batches.requested(iterator)

    @contained("observe.data")
    def _data_failed(self, iterator: Any) -> None:
        if self.paused:
            return
        self._batches.taken(iterator)

    @contained("observe.data")
    def _data_arrived(self, iterator: Any, batch: Any) -> None:
        if self.paused:
            return
        if self._thin:
            self._economy.data_arrived(iterator, batch)
            return
        self._batches.taken(iterator)
        direct = _asked_by_user(sys._getframe(1))
        self._batches.arrived(batch, direct=direct)
        if self._habits.awake:
            self._habits.fetched(iterator, self._batches.origin[0], sys._getframe(1), direct=direct)
        self._clock.leave()
        self._step_opens(user_frame(sys._getframe(1)))
        self.expect_forward()

    def _step_opens(self, user: FrameType | None) -> None:
        """Data has come or gradients were cleared: the step proper begins."""
        if not self._is_opened:
            self._is_opened = True
            self._opened_by_others += 1
        self._step_begins(user)

    def _step_begins(self, user: FrameType | None) -> None:
        if self._noting:
            try:
                self._notes.step_begins(user)
            except Exception as error:
                self._notes_failed(error)

    # Forward

    def expect_forward(self) -> None:
        """Wait for the next call of any module, which is that of a root.

        A global module hook slows every module down, so it is there only until the first call and then takes itself
        away: what runs inside the root is untouched.
        """
        if not self._compiled_watched:
            self._watch_compiled()
        if self._forward_expected:
            return
        # What `register_module_forward_pre_hook` does, without the handle that it makes: this happens every step.
        nn_module._global_forward_pre_hooks[_OUR_HOOK] = self._forward_begins
        self._forward_expected = True

    def _forget_forward(self) -> None:
        self._forward_expected = False
        nn_module._global_forward_pre_hooks.pop(_OUR_HOOK, None)

    def _watch_compiled(self) -> None:
        """See compiled code from outside, where it is entered.

        It is specialised on whether there are global module hooks: one that comes and goes would have it compiled
        again, and one that is there would have it warn. So ours is taken away before anybody looks.
        """
        entries = sys.modules.get("torch._dynamo.eval_frame")  # imported with the first optimizer
        if entries is None or not hasattr(entries, "_callback_from_stance"):
            return
        self._compiled_watched = True

        def around_entry(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def _callback_from_stance(callback: Any) -> Any:
                if callable(callback):
                    if self.checkup is not None and self.checkup.is_armed:
                        self._check_up("compiled")
                    if self._forward_expected:
                        self._note_forward()
                return original(callback)

            return _callback_from_stance

        def around_question(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def _has_any_global_hook() -> Any:
                if self._forward_expected:
                    self._note_forward()
                return original()

            return _has_any_global_hook

        for code in (*_entries, type(self)._note_forward.__code__):  # the latter is that of all contained hooks
            entries.skip_code(code)
        _wrap(entries, "_callback_from_stance", around_entry)
        if hasattr(nn_module, "_has_any_global_hook"):
            _wrap(nn_module, "_has_any_global_hook", around_question)

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced through: constant, no graph break
        self._note_forward(module, args)

    @contained("observe.forward")
    def _note_forward(self, module: torch.nn.Module | None = None, args: Any = ()) -> None:
        if self.paused:
            return
        self._forget_forward()
        if module is not None:
            self._rewind.see(module)
            self._batches.given(args, module.training)
        if self._backward_depth == 0:  # recomputation of a checkpoint is part of backward
            user = self._clock.enter(FORWARD, sys._getframe(2))
            if self.leaks is not None and module is not None:
                self.leaks.called(training=module.training)
            habits = self._habits
            if module is not None and (
                habits.awake or (habits.listening and habits.mode != (module.training, torch.is_grad_enabled()))
            ):
                habits.forward(module, sys._getframe(2))
            if not self._is_opened:
                if self._opened_by_others >= _SURE:
                    self._step_begins(user)  # after all, nobody has opened this step
                self._opened_by_others = 0
            self._notes.forward_begins(sys._getframe(2))

    # Backward

    def _watch_backward(self) -> None:
        # The name that `Tensor.backward`, `autograd.backward`, `autograd.grad` and `func.grad` all call through.
        _wrap(torch.autograd, "_engine_run_backward", self._around_backward)

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)  # traced, not run
            if self.leaks is not None and len(args) > 3 and args[3] and kwargs.get("accumulate_grad"):
                self.leaks.cycles.made(sys._getframe(1))
            self._backward_begins(args[0] if args else kwargs.get("t_outputs", ()))
            result = original(*args, **kwargs)
            self._backward_ends()
            return result

        return _engine_run_backward

    @contained("observe.backward")
    def _backward_begins(self, roots: Any) -> None:
        if self.paused:
            return
        self._backward_depth += 1
        if self._thin:
            if self._backward_depth == 1:
                self._thin_backward_begins(roots, sys._getframe(1))
            return
        if self._backward_depth == 1:
            endings.training_goes_on()
            self._clock.enter(BACKWARD, sys._getframe(1))
            if self.checkup is not None and self.checkup.on:
                self._check_up("backward_begins", roots, (self._clock.file, self._clock.line), sys._getframe(1))
            if self._habits.awake:
                self._habits.backward_begins(roots, sys._getframe(1))
            # Inside of `torch.func` and of a dispatch mode the values are not there to be looked at.
            if self._finite.on and peek_interpreter_stack() is None and not torch._C._len_torch_dispatch_stack():
                try:
                    self._finite.backward_begins(roots, (self._clock.file, self._clock.line), sys._getframe(1))
                except Exception as error:
                    self._numbers_failed(error, sys._getframe(1))

    def _thin_backward_begins(self, roots: Any, frame: FrameType) -> None:
        if peek_interpreter_stack() is None and not torch._C._len_torch_dispatch_stack():
            try:
                self._economy.backward_begins(roots)
            except Exception as error:
                self._numbers_failed(error, frame)

    @contained("observe.backward")
    def _backward_ends(self) -> None:
        if self.paused:
            return
        # A backward that raised leaves the depth up; a loop that survives it is set right by the next optimizer step.
        self._backward_depth = max(0, self._backward_depth - 1)
        if self._thin and self._backward_depth == 0 and self._stepping is None and not self._finite.is_alarmed:
            self._clock.backward_done()
            return
        if self._backward_depth == 0:
            self._clock.backward_done()
            self._clock.leave()
            if self._habits.awake:
                self._habits.backward_ended()
            self.expect_forward()
            if self._finite.on:
                try:
                    self._finite.backward_ended(sys._getframe(1), self._clock, self._stepping)
                except Exception as error:
                    self._numbers_failed(error, sys._getframe(1))
            if self.checkup is not None and self.checkup.on:
                self._check_up("backward_ended", sys._getframe(1), self._clock.optimizer_count > 0)

    # Optimizer

    def _watch_optimizers(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._optimizer_begins))
        self._handles.append(register_optimizer_step_post_hook(self._optimizer_ends))
        _wrap(Optimizer, "_patch_step_function", self._around_build)
        _wrap(Optimizer, "zero_grad", self._around_zero_grad)

    def _around_build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> Any:
            result = original(optimizer)
            self._optimizer_built(optimizer)
            return result

        return _patch_step_function

    @contained("observe.optimizer")
    def _optimizer_built(self, optimizer: Any) -> None:
        self.expect_forward()
        self._clock.optimizer_built(optimizer)
        self._habits.optimizer_built(optimizer, sys._getframe(1))
        if self.leaks is not None:
            self.leaks.mark("trial", sys._getframe(1))
        self._step_begins(user_frame(sys._getframe(1)))  # the first step of a loop that has no loader begins about here

    def _around_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(optimizer, *args, **kwargs)
            listening = self._habits.awake and not self.paused
            if listening:
                self._habits.zero_begins(optimizer, sys._getframe(1))
            result = original(optimizer, *args, **kwargs)
            if listening:
                self._habits.zero_ended(optimizer)
            self._gradients_cleared()
            return result

        return zero_grad

    @contained("observe.zero_grad")
    def _gradients_cleared(self) -> None:
        if self.paused:
            return
        self._finite.cleared()
        if self._thin:
            return
        if self._clock.micro_step == 0 and self._notes.is_fresh():
            self._step_opens(user_frame(sys._getframe(1)))  # many loops open with it, and some have no loader
        self.expect_forward()

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._note_optimizer_begins(optimizer)

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._note_optimizer_ends(optimizer, stepped=True)

    @contained("observe.optimizer")
    def _note_optimizer_begins(self, optimizer: Any) -> None:
        if self.paused:
            return
        self._backward_depth = 0
        self._step_skipped = False
        if not self._thin:
            self._clock.enter(OPTIMIZER, sys._getframe(1))
        if self.checkup is not None and self.checkup.on:
            self._check_up("step_begins", optimizer)
        if self._habits.awake:
            self._habits.step_begins(optimizer, sys._getframe(1))
        if self._finite.on and not (self._thin and self._finite.takes_on_trust()):
            try:
                self._finite.step_begins(optimizer, sys._getframe(1))
            except Exception as error:
                self._numbers_failed(error, sys._getframe(1))
        self._stepping = optimizer

    @contained("observe.optimizer")
    def _note_optimizer_ends(self, optimizer: Any, *, stepped: bool) -> None:
        if self.paused:
            return
        self._stepping = None
        if stepped and self._finite.on and not (self._thin and self._finite.holds_losses):
            try:
                self._finite.step_ended(optimizer, sys._getframe(1))
            except Exception as error:
                self._numbers_failed(error, sys._getframe(1))
        self._clock.optimizer_stepped(optimizer)
        if self.leaks is not None and self._clock.step >= self.leaks.due:
            self.leaks.stepped(self._clock.step, sys._getframe(1))
        if self._habits.awake:
            self._habits.step_ended(optimizer, stepped=stepped)
        self._thin = self._economy.applies()
        if self._thin:
            self._economy.begin()
            self._forget_forward()
            return
        self._clock.leave()
        if self.checkup is not None and self.checkup.on:
            self._check_up("step_ended", sys._getframe(1))
        # Where data or `zero_grad` are seen to open every step, what would be noted here is never used.
        if self._opened_by_others < _SURE:
            self._step_begins(user_frame(sys._getframe(1)))
        else:
            self._notes.step_is_over()
        self._is_opened = False
        self.expect_forward()

    # GradScaler

    def _watch_scaler(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        _wrap(GradScaler, "scale", self._around_scale)
        _wrap(GradScaler, "step", self._around_scaler_step)

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.scaler")(self._finite.scaled)

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            note(outputs, result)
            return result

        return scale

    def _around_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._scaler_step_begins()
            result = original(scaler, optimizer, *args, **kwargs)
            self._scaler_step_ends(scaler, optimizer)
            return result

        return step

    @contained("observe.scaler")
    def _scaler_step_begins(self) -> None:
        self._step_skipped = True  # until the optimizer says otherwise

    @contained("observe.scaler")
    def _scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A step that the scaler skips is a step of the loop all the same."""
        if self._step_skipped:
            self._step_skipped = False
            if self._finite.on and not self.paused:
                self._finite.step_skipped(scaler, optimizer, sys._getframe(1))
            self._note_optimizer_ends(optimizer, stepped=False)


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's own code asked for a batch, rather than a library that may fetch ahead."""
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _LOADING)):
        frame = frame.f_back
    return frame is None or is_user_file(frame.f_code.co_filename)


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    patch = around(original)
    _patched.append((owner, name, original))
    _entries.append(patch.__code__)
    setattr(owner, name, patch)
