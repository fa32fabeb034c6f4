"""A root module is called, compiled or not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from torchmedic.contained import contained
from torchmedic.observe.hooks import patches
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.step.clock import FORWARD

_OUR_HOOK = -7001  # keys of torch's own count up from 0


class ForwardHooks:
    """Waits for the next call of any module, which is that of a root.

    A global module hook slows every module down, so it is there only until the first call and then takes itself away:
    what runs inside the root is untouched.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._is_expected = False
        self._compiled_watched = False

    def expect(self) -> None:
        if not self._compiled_watched:
            self._watch_compiled()
        if self._is_expected:
            return
        # What `register_module_forward_pre_hook` does, without the handle that it makes: this happens every step.
        nn_module._global_forward_pre_hooks[_OUR_HOOK] = self._begins
        self._is_expected = True

    def forget(self) -> None:
        self._is_expected = False
        nn_module._global_forward_pre_hooks.pop(_OUR_HOOK, None)

    def remove(self) -> None:
        self.forget()
        self._compiled_watched = False

    def _watch_compiled(self) -> None:
        """See compiled code from outside, where it is entered.

        It is specialised on whether there are global module hooks: one that comes and goes would have it compiled
        again, and one that is there would have it warn. So ours is taken away before anybody looks.
        """
        entries = sys.modules.get("torch._dynamo.eval_frame")  # imported with the first optimizer
        if entries is None or not hasattr(entries, "_callback_from_stance"):
            return
        self._compiled_watched = True
        for code in (*patches.entries, type(self)._note.__code__):  # the latter is that of all contained hooks
            entries.skip_code(code)
        patches.wrap(entries, "_callback_from_stance", self._around_entry)
        if hasattr(nn_module, "_has_any_global_hook"):
            patches.wrap(nn_module, "_has_any_global_hook", self._around_question)

    def _around_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _callback_from_stance(callback: Any) -> Any:
            if callable(callback):
                step = self._step
                if step.checkup is not None and step.checkup.is_armed:
                    step.check_up(step.checkup.compiled)
                if self._is_expected:
                    self._note()
            return original(callback)

        return _callback_from_stance

    def _around_question(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _has_any_global_hook() -> Any:
            if self._is_expected:
                self._note()
            return original()

        return _has_any_global_hook

    def _begins(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced through: constant, no graph break
        self._note(module, args)

    @contained("observe.forward")
    def _note(self, module: torch.nn.Module | None = None, args: Any = ()) -> None:
        step = self._step
        if step.paused:
            return
        self.forget()
        if module is not None:
            step.rewind.see(module)
            step.batches.given(args or _keywords(sys._getframe(3)), module)
        if step.backward_depth == 0:  # recomputation of a checkpoint is part of backward
            user = step.clock.enter(FORWARD, sys._getframe(2))
            if step.leaks is not None and module is not None:
                step.leaks.called(training=module.training)
            habits = step.habits
            if module is not None and (
                habits.awake or (habits.listening and habits.mode != (module.training, torch.is_grad_enabled()))
            ):
                habits.forward(module, sys._getframe(2))
            step.goes_forward(user)
            step.notes.forward_begins(sys._getframe(2))


def _keywords(caller: FrameType) -> tuple[Any, ...]:
    """The keyword arguments of a module call such as `model(**batch)`: torch does not give them to global hooks."""
    given = caller.f_locals.get("kwargs")
    return tuple(given.values()) if isinstance(given, dict) else ()
