"""A backward pass that runs out of memory.

A backward frees its graph as it goes, so half a backward cannot be repeated. The step is computed once more by the
replay engine, which repeats none of its side effects. If its loss is the same bit for bit, backward runs through the
new graph, and only for the leaves that have not received their gradient yet.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.autograd

from torchmedic.contained import report_fault
from torchmedic.detect.failures.exhaustion import exhaustion_of_error, is_out_of_memory
from torchmedic.observe.hooks.patches import without_our_frame
from torchmedic.recovery import other_ranks, script_code
from torchmedic.recovery.computed_again import ComputedAgain, Refused
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.room import free_unused_memory
from torchmedic.recovery.script_code import without_trace
from torchmedic.recovery.session import Session
from torchmedic.replay.step.step import from_stack
from torchmedic.source.objects.graph import leaves_behind
from torchmedic.source.objects.living import living
from torchmedic.source.segment.cut import CannotCut

_is_compiling = torch.compiler.is_compiling
_FAILED = object()
_EVERYTHING = 1 << 62  # bytes
_PARTS = (2, 4, 8, 16)  # of the rows of a batch, where a step needs too much with all of its saved tensors out


class Gradients:
    """Which leaves have a gradient, before a backward adds to it."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._before = [(leaf, gradient := leaf.grad, -1 if gradient is None else gradient._version) for leaf in leaves]

    def unfinished(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves that the failed backward has not come to.

        Raises:
            Refused: A leaf belongs to no optimizer, and may have had its gradient before.
        """
        done = set()
        known = set()
        for leaf, gradient, version in self._before:
            known.add(id(leaf))
            if leaf.grad is not gradient or (gradient is not None and gradient._version != version):
                done.add(id(leaf))
        if any(id(leaf) not in known and leaf.grad is not None for leaf in leaves):
            raise Refused("a tensor that no optimizer has collects gradients")
        return [leaf for leaf in leaves if id(leaf) not in done]

    @property
    def has_begun(self) -> bool:
        return any(
            leaf.grad is not gradient or (gradient is not None and gradient._version != version)
            for leaf, gradient, version in self._before
        )


class _Call:
    """One call of the engine, with the arguments that `backward()` and `autograd.grad` give it."""

    def __init__(self, original: Callable[..., Any], roots: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._original = original
        self.roots = tuple(roots)
        self._args = list(args)
        self._kwargs = kwargs
        self.keeps_graph = bool(len(args) > 2 and (args[1] or args[2]))
        self.inputs: tuple[Any, ...] = tuple(args[3]) if len(args) > 3 else ()
        self.accumulates = bool(kwargs.get("accumulate_grad", False))

    def run(self, roots: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        args = list(self._args)
        args[3] = tuple(inputs)
        return self._original(tuple(roots), *args, **self._kwargs)


class GuardedEngine:
    """Stands in the place of autograd's engine, below every hook and every wrapper of `backward`."""

    def __init__(self, session: Session, engine: Any) -> None:
        self._session = session
        self._engine = engine
        self._depth = 0
        self._sent = other_ranks.Sent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def leave(self) -> None:
        """The guard is down: take the hooks on the parameters away."""
        self._sent.remove()

    def run_backward(self, t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        session, run = self._session, self._engine.run_backward
        if session.need.is_measuring and not self._depth:
            session.need.measure(t_outputs)
        if not session.is_up:
            self.leave()
            return run(t_outputs, *args, **kwargs)
        if self._depth or len(args) < 4 or session.in_parts.is_trying or _is_compiling():
            return run(t_outputs, *args, **kwargs)
        self._depth += 1
        session.graphs_run += 1
        try:
            parameters = session.optimizers.parameters
            gradients = Gradients(parameters)
            if other_ranks.are_there():
                self._sent.begin(parameters)
            session.make_room_for_backward(t_outputs)
            keeps_graph = bool(args[1] or args[2])
            session.saved.backward.begin(session.backward_room.spare, keeps_graph=keeps_graph)
            session.in_parts.may_overwrite = not keeps_graph
            session.in_parts.is_refused |= bool(args[2])
            session.splits.is_refused |= bool(args[2])
            try:
                result = run(t_outputs, *args, **kwargs)
            except BaseException as error:
                without_our_frame(error)
                if not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
                    raise
                session.backward_room.failed()
                session.workspaces.was_raised()
                call = _Call(run, t_outputs, args, kwargs)
                result = self._repeated(call, gradients, error, sys._getframe(1))
                if result is _FAILED:
                    raise
            session.backward_room.succeeded()
            session.note_random_state()
            return result
        finally:
            self._depth -= 1
            session.in_parts.may_overwrite = False

    def _repeated(self, call: _Call, gradients: Gradients, error: BaseException, frame: FrameType) -> Any:
        session = self._session
        try:
            reason = session.reason_against() or self._reason_against(call, error)
            if reason:
                raise Refused(reason)
            if call.keeps_graph:
                return self._on_kept_graph(call, gradients, error)
            return self._on_new_graph(call, gradients, error, frame)
        except Refused as refused:
            session.refuse("backward", str(refused))
        except CannotCut as refused:
            session.refuse("backward", f"the step cannot be computed again: {refused}")
        except KeyboardInterrupt:
            raise
        except Exception as failure:
            if is_out_of_memory(failure):
                session.refuse("backward", session.nothing_left())
            else:
                report_fault("recover.backward", failure)
        return _FAILED

    def _reason_against(self, call: _Call, error: BaseException) -> str:
        if other_ranks.are_there() and (reason := other_ranks.reason_against(call.roots)):
            return reason
        if not call.accumulates and not call.keeps_graph and not all(_is_leaf(each) for each in call.inputs):
            return "gradients of intermediate results were asked for"
        if call.accumulates and any(_retains(each) for each in living(torch.Tensor)):
            return "an intermediate result retains its gradient"
        if reason := script_code.reason_against(error, self._session.optimizers.parameters):
            return reason
        if self._session.level == "safe" and script_code.has_backward_hooks():
            return "a module has a backward hook, which would run twice (--recover all allows it)"
        return ""

    def _on_kept_graph(self, call: _Call, gradients: Gradients, error: BaseException) -> Any:
        """The code keeps the graph, so the backward can be repeated on it."""
        session, started = self._session, time.monotonic()
        for room in session.room.rooms(error, frozenset(), is_update=False, least=session.next_steps.parked_in_step):
            try:
                result = self._run(call, call.roots, gradients)
            except Exception as again:
                if not is_out_of_memory(again):
                    raise
                continue
            session.recovered("backward", room.means, "backward", room.nbytes, time.monotonic() - started)
            return result
        raise Refused(session.nothing_left())

    def _on_new_graph(self, call: _Call, gradients: Gradients, error: BaseException, frame: FrameType) -> Any:
        session, started = self._session, time.monotonic()
        traceback.clear_frames(error.__traceback__)  # of a call that was to compute a saved tensor again
        again = ComputedAgain(from_stack(frame, session.context, include_failing=True), session)
        session.space.file.open()
        if not call.inputs:
            with unseen():
                session.saved.release(call.roots)
                session.in_parts.release(call.roots)
        for budget, parts in self._budgets(error):
            spill = session.early_spill(budget)
            roots: list[torch.Tensor] = []
            try:
                with session.splits.forced(parts) if parts else contextlib.nullcontext():
                    roots = again.roots(call.roots, spill)
                    if parts and not session.splits.made:
                        raise Refused(f"{session.nothing_left()}; {session.splits.reasons()}")
                is_free = session.level == "all"
                watched = (
                    contextlib.nullcontext() if is_free else without_trace(frame, roots, has_hooks=again.has_hooks)
                )
                with watched:
                    result = self._run(call, roots, gradients)
            except Exception as failure:
                if not is_out_of_memory(failure):
                    raise
                with unseen():
                    session.saved.release(roots)
                    session.in_parts.release(roots)
                traceback.clear_frames(failure.__traceback__)
                continue
            if parts:
                session.splits.recovered("backward", session.splits.made, time.monotonic() - started)
            else:
                session.recovered("backward", "recompute", "backward", spill.spilled, time.monotonic() - started)
            return result
        raise Refused(session.nothing_left())

    def _budgets(self, error: BaseException) -> Iterator[tuple[int, int]]:
        """The bytes of saved tensors to take out, and the parts in which modules are called.

        Some bytes at first, more, all, all with optimizer state out as well, at last in more and more parts.
        """
        found, session = exhaustion_of_error(error), self._session
        more = 2 * max((found.asked or 0) if found is not None else 0, session.next_steps.parked_in_step)
        for times in (1, 3):
            free_unused_memory()
            yield session.next_steps.budget + times * more, 0
        free_unused_memory()
        yield _EVERYTHING, 0
        with unseen():
            free = session.optimizers.park(_EVERYTHING, frozenset(), gradients=False)
        if free:
            free_unused_memory()
            yield _EVERYTHING, 0
        for parts in _PARTS:
            free_unused_memory()
            yield _EVERYTHING, parts

    def _run(self, call: _Call, roots: Sequence[torch.Tensor], gradients: Gradients) -> Any:
        """Run the backward for the leaves that have no gradient yet."""
        if not call.accumulates or not gradients.has_begun:
            return call.run(roots, call.inputs)
        wanted = [each for each in call.inputs if _is_leaf(each)] if call.inputs else leaves_behind(roots)
        left = gradients.unfinished(wanted)
        if other_ranks.are_there() and (reason := self._sent.reason_against(wanted, left)):
            raise Refused(reason)
        return call.run(roots, left) if left else ()


def _is_leaf(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf


def _retains(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.retains_grad)
    except RuntimeError:
        return False
