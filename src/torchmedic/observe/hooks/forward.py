"""A root module is called, compiled or not."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.nn.modules import module as nn_module

from torchmedic.contained import contained, is_below_compiled
from torchmedic.observe.hooks import patches
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.step.clock import FORWARD
from torchmedic.observe.step.wrappers import inside

_CALL = torch.nn.Module._call_impl.__code__
# The call of a module without hooks of its own, and the function inside it that runs them.
_CALLS = (_CALL, *(part for part in _CALL.co_consts if isinstance(part, CodeType)))


class _AskedHooks(OrderedDict[int, Any]):
    """Stands for torch's dict of global module hooks, and tells when it is asked whether there are any.

    `Module.__call__` asks. A hook of ours in the dict would lead the call another way: one frame more on the stack, in
    every traceback and for every warning that counts frames. All else is passed on to torch's own dict.
    """

    def __init__(self, hooks: dict[int, Any], asked: Callable[[FrameType], None]) -> None:
        super().__init__()
        self._hooks = hooks
        self._asked = asked

    def __len__(self) -> int:
        self._asked(sys._getframe(1))
        return len(self._hooks)


def _pass_on(name: str) -> Callable[..., Any]:
    def method(asked: _AskedHooks, *args: Any, **kwargs: Any) -> Any:
        return getattr(asked._hooks, name)(*args, **kwargs)

    return method


for _name in (
    *("__setitem__", "__getitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__eq__", "__repr__"),
    *("items", "keys", "values", "get", "pop", "popitem", "setdefault", "update", "clear", "copy", "move_to_end"),
):
    setattr(_AskedHooks, _name, _pass_on(_name))


class ForwardHooks:
    """Waits for the next call of any module, which is that of a root. What runs inside the root is untouched."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._hooks: dict[int, Any] = nn_module._global_forward_pre_hooks
        self._asking = _AskedHooks(self._hooks, self._asked)
        self._is_expected = False
        self._stance: tuple[Any, Any, Any] | None = None  # the module with `_callback_from_stance`, torch's, and ours

    def expect(self) -> None:
        """Notice the next call of a module. Asked every step.

        Not while the compiler traces: its own backward pass ends too, and code that is specialised on the dict of
        `_AskedHooks` would be compiled again in every step. Below compiled code the rest of the step may be compiled
        next, and the compiler fails if the dict changes meanwhile: there only the next entry into compiled code counts.
        """
        if TracingContext.try_get() is not None:
            return
        if self._stance is None:
            self._watch_compiled()
        else:
            self._stance[0]._callback_from_stance = self._stance[2]
        self._is_expected = True
        if not is_below_compiled():
            nn_module._global_forward_pre_hooks = self._asking

    def forget(self) -> None:
        self._is_expected = False
        nn_module._global_forward_pre_hooks = self._hooks

    def rest(self) -> None:
        """Notice nothing until a call is expected again. torch asks for the stance several times a step."""
        self.forget()
        if self._stance is not None:
            self._stance[0]._callback_from_stance = self._stance[1]

    def remove(self) -> None:
        self.forget()
        self._stance = None

    def _watch_compiled(self) -> None:
        """See compiled code from outside, where it is entered.

        It is specialised on the dict of global module hooks, and knows only a plain dict. So torch's own is back before
        anybody looks.
        """
        entries = sys.modules.get("torch._dynamo.eval_frame")  # imported with the first optimizer
        if entries is None or not hasattr(entries, "_callback_from_stance"):
            return
        for code in (*patches.entries, type(self)._note.__code__):  # the latter is that of all contained hooks
            entries.skip_code(code)
        original = entries._callback_from_stance
        patches.wrap(entries, "_callback_from_stance", self._around_entry)
        entries.skip_code(entries._callback_from_stance.__code__)  # torch 2.6 would compile it
        self._stance = entries, original, entries._callback_from_stance

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
        self.forget()
        if torch._C._get_tracing_state() is not None:  # `torch.jit.trace` would take down even a look at a shape
            return
        if frame.f_code in _CALLS:
            values = frame.f_locals
            self._note(values["self"], values["args"] or tuple(values["kwargs"].values()), frame)
        elif frame.f_code.co_name == "_has_any_global_hook":
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
            model = inside(module) if module is not None else None
            if step.leaks is not None and model is not None:
                step.leaks.called(training=model.training)
            habits = step.habits
            if model is not None and (
                habits.awake or (habits.listening and habits.mode != (model.training, torch.is_grad_enabled()))
            ):
                habits.forward(model, frame)
            step.goes_forward(user)
            step.notes.forward_begins(frame)
