"""A changed step taken for real, in a copy of the process that the step as it was has ended.

While an exception lives, its frames keep what the failed step had made, and there is no room to run anything. In a copy
they can be cleared. What the step began with is still there: the weights, the state of the optimizers, the batch.
Nothing is put back afterwards: the copy is thrown away.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.evidence.memory.fake.whole_step import Change, NotRows, WholeStep
from torchmedic.replay.fake.changes import gradients_stay
from torchmedic.replay.isolation.outside_world import sealed
from torchmedic.replay.isolation.sandbox import Bounds, ReplayTooBig, ReplayTooLong
from torchmedic.replay.isolation.torch_state import muted, rewind_rng
from torchmedic.replay.step.prepared_names import SegmentEnd
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.step.trial import attempt
from torchmedic.source.objects.finite import is_finite
from torchmedic.source.objects.graph import leaves_behind

OTHER_ERROR = "it raised"  # something that has nothing to do with memory
_YIELDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Outcome(NamedTuple):
    """The outcome of a change. It holds no exception, which would hold its frames."""

    passed: bool | None  # None if that could not be told
    result: str = ""
    patch: str = ""


class RealStep(WholeStep):
    """A step that can run again for real, without anything of its first run."""

    evaluation: bool
    step: Step  # the same, for source that is cut anew

    @classmethod
    def after(cls, step: WholeStep, of: Step, *, evaluation: bool) -> RealStep:
        made = cls.__new__(cls)
        lead_back = ("fakes", "wanted")  # to what the failed step has made
        made.__dict__.update({name: value for name, value in step.__dict__.items() if name not in lead_back})
        made.evaluation = evaluation
        made.step = of.run_by(made)
        return made

    def forget(self, error: BaseException) -> None:
        """Free what the failed step has made."""
        namespace = self._namespace()
        made = self.left_over().keys()
        begun = {name: namespace[name] for name in self._locals if name in namespace and name not in made}
        if self._frame.f_locals is self._frame.f_globals:  # the script's own level: clearing the frame leaves these
            for name in made:
                self._frame.f_globals.pop(name, None)
            self._frame.f_globals.update(begun)
        self._locals = begun
        if self.clears_gradients or not self.accumulates:
            for leaf in self.leaves:
                leaf.grad = None
        clear_frames(error)
        gc.collect()

    def take(self, change: Change, seconds: float) -> Outcome:
        """Take the step, changed, and update the weights."""
        if change.rewritten is not None:
            return Outcome(*attempt(self.step, change.rewritten.edit))
        played = ReplayResult()
        for tensor in change.cut.tensors if change.cut is not None else ():
            with contextlib.suppress(RuntimeError):  # a view
                tensor.detach_()
        gc.collect()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(muted())
                stack.enter_context(sealed())  # a copy of the process has the files and connections of the first
                namespace = self._changed(stack, change, played, (), keep_rng=True)
                # No `Alarm`: it might take of the memory that is to suffice, and whoever forked us ends us in time.
                stack.enter_context(Bounds(seconds))
                for _ in self._turns(stack, change):
                    rewind_rng(self._notes)
                    with contextlib.suppress(SegmentEnd):
                        self._run(dict(namespace), change.rows)
                outcome = self._judged(played)
            self._update_weights()
        except (ReplayTooLong, ReplayTooBig, NotRows):
            return Outcome(None)
        except Exception as failure:
            words = f"{OTHER_ERROR} {type(failure).__name__}: {failure}".splitlines()[0][:80]
            return Outcome(False, "it ran out of memory as well" if is_out_of_memory(failure) else words)
        return outcome

    def _turns(self, stack: contextlib.ExitStack, change: Change) -> Iterator[int]:
        """Turns of the step: a smaller batch takes several for one update, and the second has gradients to add to."""
        yield 1
        if change.rows is not None and not self.evaluation:
            stack.enter_context(gradients_stay())
            yield 2

    def _judged(self, played: ReplayResult) -> Outcome:
        """Judge a step by its loss and gradients; takes next to no memory."""
        if self.evaluation:
            return Outcome(True, "it ran to its end")
        values = [root.detach() for root in played.roots if root.is_floating_point()]
        leaves = {id(tensor): tensor for tensor in [*self.parameters, *leaves_behind(played.roots)]}
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None] + played.returned
        if not values or not gradients:
            return Outcome(None)  # it never came to its backward
        loss = f"loss {float(values[0].item()):.5g}, " if values[0].numel() == 1 else ""
        if not all(is_finite(each) for each in [*values, *gradients]):
            return Outcome(False, f"{loss}not all numbers finite")
        return Outcome(True, f"{loss}all gradients finite")

    def _update_weights(self) -> None:
        if self.evaluation:
            return
        for optimizer in self._optimizers:
            step = inspect.unwrap(type(optimizer).step)
            closure = inspect.signature(step).parameters.get("closure")
            if closure is None or closure.default is not inspect.Parameter.empty:
                with torch.no_grad():
                    step(optimizer)


def clear_frames(error: BaseException) -> None:
    """Empty the frames of an exception, of those that led to it, and of their callers, which no traceback need hold."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        tb = chain.__traceback__
        while tb is not None:
            frame: FrameType | None = tb.tb_frame
            while frame is not None and id(frame) not in seen:
                seen.add(id(frame))
                # To clear one that has yielded would run the user's `finally`; one that is still running refuses.
                if not frame.f_code.co_flags & _YIELDS:
                    with contextlib.suppress(RuntimeError):
                        frame.clear()
                        frame.f_locals  # noqa: B018 - until Python 3.12 a copy, which is only now made anew
                frame = frame.f_back
            tb = tb.tb_next
        chain = chain.__cause__ or chain.__context__
