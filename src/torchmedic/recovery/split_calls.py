"""Calls of modules that are made in parts of their rows, where nothing else is left to do about an out-of-memory.

The exception goes up through the calls of modules that are under way. The first one whose rows are independent is made
again in parts; so as little of the script's code as possible runs again. The next steps make the call in parts at once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchmedic.contained import report_fault
from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.records.recovery import Means, RecoveryPhase
from torchmedic.recovery.call_in_parts import CallInParts
from torchmedic.recovery.module_calls import WHOLE, around_call, has_hooks, is_in_line_search, is_inside_call
from torchmedic.recovery.random_calls import generator_states
from torchmedic.recovery.room import free_unused_memory
from torchmedic.recovery.rows import CannotSplit, RowCall, settings_of
from torchmedic.recovery.split_trial import NoMemory, Verdict, tried
from torchmedic.source.objects.graph import packs_saved_tensors

if TYPE_CHECKING:
    from torchmedic.recovery.session import Session

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_MAX_TRIALS = 16  # before a step is computed again in parts
_MAX_VERDICTS = 1000
_MAX_REASONS = 3
_TOO_LARGE = "one row alone needs too much"


class NotTried(CannotSplit):
    """Nothing is known about such a call."""


class _Kept(NamedTuple):
    """A call that is made in parts from now on."""

    module: weakref.ref[torch.nn.Module]
    whole: int  # number of all rows
    rows: int  # of a part
    backward_rows: int


class SplitCalls:
    """Which calls of modules are made in parts, and why others are not."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._original: Any = None
        self._thread = 0  # that trains
        self._kept: dict[int, _Kept] = {}  # by the module
        self._verdicts: dict[tuple[Any, ...], tuple[weakref.ref[torch.nn.Module], Verdict | str]] = {}
        self._reasons: list[str] = []  # against a split, outermost call first
        self._trials = 0
        self._is_inside = False  # a part or a trial
        self._forced = 0  # parts in which each call is to be made, outermost first
        self.is_refused = False  # a gradient of a gradient was asked for
        self.unhelped = 0  # identity of the exception that nothing else could be done about
        self.has_plans = False
        self.made: dict[str, bool] = {}  # names of the modules that were called in parts, and whether they draw

    @property
    def are_kept(self) -> bool:
        return bool(self._kept)

    def install(self) -> None:
        """See the calls of modules from now on."""
        self._thread = threading.get_ident()
        if self._original is None:
            self._original = torch.nn.Module.__call__
            torch.nn.Module.__call__ = around_call(self, self._original)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave the calls of modules as they were."""
        if self._original is not None:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def may_help(self, error: BaseException) -> bool:
        """Whether a call of a module is under way that may be made in parts; the exception has to be raised then."""
        if self._is_inside or not is_inside_call(sys._getframe(1)):
            return self._is_inside
        self.unhelped = id(error)
        self._reasons = []
        return True

    def planned(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a call that is to be made in parts; `WHOLE` if it is not."""
        kept = self._kept.get(id(module))
        if self._is_inside or threading.get_ident() != self._thread:
            return WHOLE
        if not self._forced and (kept is None or kept.module() is not module):
            return WHOLE
        try:
            call, verdict = self._tried(module, args, kwargs, again=bool(self._forced))
            rows = kept.rows if kept is not None and not self._forced else -(-call.count // max(self._forced, 2))
            return WHOLE if call.count <= rows else self._in_parts(module, call, verdict, rows)
        except NotTried:
            pass
        except CannotSplit as reason:
            self._note(module, reason)
            self._forget(module)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._note(module, _TOO_LARGE)
            self._pass_on(error, sys._getframe(2))
            raise
        return WHOLE

    def after_failure(self, module: torch.nn.Module, args: Any, kwargs: Any, error: BaseException) -> Any:
        """The result of a call that ran out of memory, made in parts; `WHOLE` if it cannot be."""
        started = time.monotonic()
        try:
            call, verdict = self._tried(module, args, kwargs)
            traceback.clear_frames(error.__traceback__)
            free_unused_memory()
            result = self._in_parts(module, call, verdict, -(-call.count // 2))
        except CannotSplit as reason:
            self._note(module, reason)
        except KeyboardInterrupt:
            raise
        except Exception as failure:
            self._forget(module)
            if is_out_of_memory(failure):
                self._note(module, _TOO_LARGE)
            else:
                report_fault("recover.split", failure)
        else:
            self.recovered("forward", {type(module).__name__: verdict.draws}, time.monotonic() - started)
            return result
        self._pass_on(error, sys._getframe(2))
        return WHOLE

    def _pass_on(self, error: BaseException, frame: FrameType) -> None:
        """Leave an exception to the next call of a module further out; where there is none, it is refused."""
        self.unhelped = id(error) if is_inside_call(frame) else 0
        if not self.unhelped:
            session = self._session
            session.refuse("forward", f"{session.nothing_left()}; {self.reasons()}")

    def recovered(self, phase: RecoveryPhase, made: dict[str, bool], seconds: float) -> None:
        """Tell that calls in parts have helped, given the names of their modules."""
        means: Means = "random split" if any(made.values()) else "split"
        self._session.recovered(phase, means, ", ".join(made), 0, seconds)

    def reasons(self) -> str:
        """Why no call could be made in parts."""
        found = list(dict.fromkeys(self._reasons))[:_MAX_REASONS]
        return "no call of a module can be made in parts of the batch" + (f" ({'; '.join(found)})" if found else "")

    def _note(self, module: torch.nn.Module, reason: object) -> None:
        text = str(reason)
        if text:
            self._reasons.insert(len(self._reasons) if self._forced else 0, f"{type(module).__name__}: {text}")

    @contextlib.contextmanager
    def forced(self, parts: int) -> Iterator[None]:
        """Make the outermost calls in parts that can be."""
        self._forced, self._trials, self.has_plans, self.made = parts, 0, True, {}
        self._reasons = []
        try:
            yield
        finally:
            self._forced = 0
            self.has_plans = bool(self._kept)

    def take_less(self) -> None:
        """Memory was enough for many steps: try parts that are twice as large, and then the whole."""
        for key, each in list(self._kept.items()):
            if each.module() is None or 2 * each.rows >= each.whole:
                del self._kept[key]
            else:
                self._kept[key] = each._replace(rows=2 * each.rows, backward_rows=2 * each.backward_rows)
        self.has_plans = bool(self._kept)

    def _forget(self, module: torch.nn.Module) -> None:
        self._kept.pop(id(module), None)
        self.has_plans = bool(self._kept) or bool(self._forced)

    def _tried(self, module: torch.nn.Module, args: Any, kwargs: Any, *, again: bool = True) -> tuple[RowCall, Verdict]:
        """The call, which a trial has passed.

        Raises:
            CannotSplit: It has not, or there is a reason not to try.
        """
        self._check(module)
        call = RowCall(functools.partial(self._original, module), args, kwargs)
        casts = torch.is_autocast_enabled(call.tensors[0].device.type)
        key = (id(module), settings_of(module), torch.is_grad_enabled(), casts, call.settings)
        known = self._verdicts.get(key)
        if known is None or known[0]() is not module:
            if not again or (self._forced and self._trials >= _MAX_TRIALS):
                raise NotTried
            self._trials += 1
            if len(self._verdicts) >= _MAX_VERDICTS:
                self._verdicts.clear()
            known = self._verdicts[key] = (weakref.ref(module), self._verdict(call, module))
        if isinstance(known[1], str):
            raise CannotSplit(known[1])
        return call, known[1]

    def _verdict(self, call: RowCall, module: torch.nn.Module) -> Verdict | str:
        try:
            with self._session.examining(), self.left_alone():
                verdict = tried(call, module)
        except NoMemory:
            raise
        except CannotSplit as reason:
            return str(reason)
        if verdict.draws and self._session.level == "safe":
            return "it draws random numbers (dropout), which would be others (--recover all allows it)"
        return verdict

    def _check(self, module: torch.nn.Module) -> None:
        """Look for what speaks against parts without a trial.

        Raises:
            CannotSplit: Something does.
        """
        if type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None:
            raise CannotSplit("")  # a single call of torch, whose result is needed as a whole
        if self.is_refused:
            raise CannotSplit("gradients of gradients were asked for")
        if isinstance(module, _WRAPPERS):
            raise CannotSplit("other ranks or devices take part in it")
        if packs_saved_tensors() or torch._C._get_tracing_state():
            raise CannotSplit("it runs inside of a checkpoint, or of other hooks for saved tensors")
        if self._session.level == "safe" and is_in_line_search(sys._getframe()):
            raise CannotSplit("LBFGS calls it, which decides by small differences (--recover all allows it)")
        if self._session.level == "safe" and has_hooks(module):
            raise CannotSplit("a module has a hook, which would see the parts (--recover all allows it)")

    def _in_parts(self, module: torch.nn.Module, call: RowCall, verdict: Verdict, rows: int) -> Any:
        kept = self._kept.get(id(module))
        put_back = generator_states()
        leaves = [*verdict.leaves, *(each for each in module.parameters() if each.requires_grad)]
        while True:
            made = CallInParts(call, module, leaves, self._part, draws=verdict.draws)
            made.has_more_room = self._session.saved.backward.has_more_room
            made.backward_rows = kept.backward_rows if kept is not None else rows
            made.learned = functools.partial(self._learned, weakref.ref(module))
            try:
                result = made.result(rows)
                break
            except CannotSplit:
                put_back()
                raise
            except RuntimeError as error:
                if not is_out_of_memory(error) or rows == 1:
                    raise
                traceback.clear_frames(error.__traceback__)
            del made
            free_unused_memory()
            put_back()
            rows = (rows + 1) // 2
        self._kept[id(module)] = _Kept(weakref.ref(module), call.count, rows, min(made.backward_rows, rows))
        self.has_plans = True
        self.made[type(module).__name__] = verdict.draws
        return result

    def _learned(self, module: weakref.ref[torch.nn.Module], rows: int) -> None:
        """A backward pass had to take smaller parts."""
        for key, each in self._kept.items():
            if each.module() is module():
                self._kept[key] = each._replace(backward_rows=rows)

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Inside the block, calls are made as a whole: an examination looks at the code as it is."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    @contextlib.contextmanager
    def _part(self) -> Iterator[None]:
        """Around the computation of a part: its calls are not taken apart, and its saved tensors are no plan's."""
        guard = self._session.guard
        spill, guard.spill = guard.spill, None
        try:
            with self.left_alone():
                yield
        finally:
            guard.spill = spill
