"""A root module is called, compiled or not."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from torchmedic.contained import contained
from torchmedic.observe.hooks import patches
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.step.clock import FORWARD

_CALL = torch.nn.Module._call_impl.__code__
_CALLS = (
    _CALL,
    *(part for part in _CALL.co_consts if isinstance(part, CodeType)),
)  # with and without hooks of a module


class _Hooks(OrderedDict[int, Any]):
    """The dict of global module hooks, in place of torch's own, whose class cannot be exchanged."""


class _AskedHooks(_Hooks):
    """Says when it is asked whether there are hooks, which `Module.__call__` does; then is a plain dict again.

    A hook of ours in the dict would lead the call another way: one frame more on the stack, in every traceback and for
    every warning that counts frames.
    """

    asked: Callable[[FrameType], None]

    def __len__(self) -> int:
        object.__setattr__(self, "__class__", _Hooks)
        self.asked(sys._getframe(1))
        return OrderedDict.__len__(self)


class ForwardHooks:
    """Waits for the next call of any module, which is that of a root. What runs inside the root is untouched."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._hooks: _Hooks | None = None
        self._compiled_watched = False

    @property
    def _is_expected(self) -> bool:
        return type(self._hooks) is _AskedHooks

    def install(self) -> None:
        """Take the place of torch's dict, before the script can register a hook in it."""
        self._hooks = nn_module._global_forward_pre_hooks = _Hooks(nn_module._global_forward_pre_hooks)
        self._hooks.__dict__["asked"] = self._asked

    def expect(self) -> None:
        """Notice the next call of a module. Asked every step."""
        if not self._compiled_watched:
            self._watch_compiled()
        if self._hooks is not None:
            self._hooks.__class__ = _AskedHooks

    def forget(self) -> None:
        if self._hooks is not None:
            self._hooks.__class__ = _Hooks

    def remove(self) -> None:
        self.forget()
        self._compiled_watched = False

    def _watch_compiled(self) -> None:
        """See compiled code from outside, where it is entered.

        It is specialised on the dict of global module hooks: one that changes would have it compiled again. So ours is
        a plain one before anybody looks.
        """
        entries = sys.modules.get("torch._dynamo.eval_frame")  # imported with the first optimizer
        if entries is None or not hasattr(entries, "_callback_from_stance"):
            return
        self._compiled_watched = True
        for code in (*patches.entries, type(self)._note.__code__):  # the latter is that of all contained hooks
            entries.skip_code(code)
        patches.wrap(entries, "_callback_from_stance", self._around_entry)

    def _around_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _callback_from_stance(callback: Any) -> Any:
            if callable(callback):
                step = self._step
                if step.checkup is not None and step.checkup.is_armed:
                    step.check_up(step.checkup.compiled)
                if self._is_expected:
                    self.forget()
                    self._note(None, (), sys._getframe(1))
            return original(callback)

        return _callback_from_stance

    def _asked(self, frame: FrameType) -> None:
        if frame.f_code in _CALLS:
            values = frame.f_locals
            self._note(values["self"], values["args"] or tuple(values["kwargs"].values()), frame)
        else:
            self._note(None, (), frame)  # a compiled module asks whether it has to warn

    @contained("observe.forward")
    def _note(self, module: torch.nn.Module | None, args: Any, frame: FrameType) -> None:
        step = self._step
        if step.paused:
            self.expect()
            return
        if module is not None:
            step.rewind.see(module)
            step.batches.given(args, module)
        if step.backward_depth == 0:  # recomputation of a checkpoint is part of backward
            user = step.clock.enter(FORWARD, frame)
            if step.leaks is not None and module is not None:
                step.leaks.called(training=module.training)
            habits = step.habits
            if module is not None and (
                habits.awake or (habits.listening and habits.mode != (module.training, torch.is_grad_enabled()))
            ):
                habits.forward(module, frame)
            step.goes_forward(user)
            step.notes.forward_begins(frame)
