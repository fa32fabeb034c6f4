"""A step computed again by replay, for a backward pass that needs a new graph; the loss must be the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.recovery.early_spill import EarlySpill
from torchmedic.recovery.guard import ReplayedCalls
from torchmedic.recovery.random_calls import RandomState
from torchmedic.recovery.session import Session
from torchmedic.replay.isolation.python_state import THOROUGH_SECONDS, TooMuchInReach
from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.step import Step

_ROUNDING = 128  # in units of the last place, for a loss whose modules were called in parts


class Refused(Exception):
    """The backward pass cannot be repeated exactly."""


class ComputedAgain:
    """The step, computed again until its loss is the same."""

    def __init__(self, step: Step, session: Session) -> None:
        self._step = step
        self._notes = step.runner._notes
        self._session = session
        self._settled = False
        self.has_hooks = False  # the step puts hooks on its results, which run in the backward pass
        step.runner.thorough = THOROUGH_SECONDS

    def roots(self, original: Sequence[torch.Tensor], spill: EarlySpill) -> list[torch.Tensor]:
        """The loss of the step with a new graph.

        Raises:
            Refused: It is not the same loss.
            RuntimeError: Memory ran out on the way.
        """
        for notes in [self._step.runner._notes] if self._settled else self._candidates():
            self._step.runner._notes = notes
            found = self._with_same_numbers(original, spill)
            if found is not None:
                self._settled = True
                return found
        raise Refused("the step gave another loss when it was computed again")

    def _candidates(self) -> Iterator[Any]:
        """The notes of the step, with every random state that it may have begun with."""
        yield self._notes
        tried: list[RandomState] = []
        states = list(reversed(self._session.random.states))
        first = self._session.context.notes.forward_rng
        if first is not None:  # in the first step, what a framework draws before it is not seen
            states.insert(0, RandomState(first, self._notes.device_rng))
        for state in states:
            if not any(state.is_same(other) for other in tried):
                tried.append(state)
                yield _NotesWith(self._notes, state)

    def _with_same_numbers(self, original: Sequence[torch.Tensor], spill: EarlySpill) -> list[torch.Tensor] | None:
        runner = self._step.runner
        runner.frozen = set()
        for _ in range(2):
            with self._session.examining():
                played = self._play(spill)
            if played.error is not None:
                if is_out_of_memory(played.error):
                    raise played.error
                raise Refused(f"the step cannot be computed again: {_first_line(played.error)}")
            if self._step.is_faithful(played, original, _ROUNDING if self._session.splits.made else 0):
                return list(played.roots[-len(original) :])
            if not played.drew_random or runner.frozen:
                break
            runner.frozen = played.drew_random
        return None

    def _play(self, spill: EarlySpill) -> ReplayResult:
        runner = self._step.runner
        original = runner._preserve
        runner._preserve = functools.partial(_preserve, runner, original)  # type: ignore[method-assign]
        spill.next_step()
        register: Any = torch.Tensor.register_hook

        @functools.wraps(register)
        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            self.has_hooks = True
            return register(tensor, hook)

        try:
            with self._session.random.rewound(), replaced(torch.Tensor, "register_hook", register_hook):
                calls = ReplayedCalls(self._session.in_parts, self._session.workspaces, spill)
                return runner.play(calls, backward=False, keep_graphs=False)
        except TooMuchInReach as reason:
            raise Refused(f"the step cannot be computed again: {reason}") from None
        finally:
            del runner._preserve


class _NotesWith:
    """The notes of a step with another random state."""

    def __init__(self, notes: Any, state: RandomState) -> None:
        self._notes = notes
        self.rng = state.rng
        self.device_rng = state.device_rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notes, name)


def _preserve(runner: Runner, original: Callable[[ExitStack], None], stack: ExitStack) -> None:
    """Hide the gradients from the replay, which would make zeros of their size in their place."""
    gradients = [(leaf, leaf.grad) for leaf in [*runner.parameters, *runner.loose_leaves]]

    def put_back() -> None:
        for leaf, gradient in gradients:
            leaf.grad = gradient

    stack.callback(put_back)
    for leaf, _ in gradients:
        leaf.grad = None
    original(stack)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
