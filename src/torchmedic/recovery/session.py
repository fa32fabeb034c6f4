"""Recovery in one process: what may be done, what was done, and when the guard is up.

The guard costs one or two microseconds per call of torch. It is up during the first updates of the weights, where most
out-of-memory errors happen, and as long as a step may run out of memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from torchmedic.contained import contained
from torchmedic.observe.context import ProcessContext
from torchmedic.records.recovery import Means, Recovery, RecoveryPhase, Refusal
from torchmedic.recovery.backward_room import BackwardRoom
from torchmedic.recovery.cross_entropy import CrossEntropyInParts
from torchmedic.recovery.early_spill import EarlySpill
from torchmedic.recovery.guard import Guard
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.need import Need
from torchmedic.recovery.next_steps import NextSteps
from torchmedic.recovery.optimizer_memory import OptimizerMemory
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.random_calls import RandomNumbers
from torchmedic.recovery.recipes import Recipes
from torchmedic.recovery.room import RoomMaker, give_back_caches, keep_blocks_whole, refills
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.recovery.split_calls import SplitCalls
from torchmedic.recovery.workspaces import Workspaces
from torchmedic.source.objects.graph import walk

Level = Literal["safe", "all"]

_ALWAYS_GUARDED_UPDATES = 10
_LOOK_SECONDS = 1.0


class Session:
    """State that the guard, the backward pass and the hooks of the optimizers share."""

    def __init__(self, level: Level, context: ProcessContext, tell: Callable[[Recovery | Refusal], None]) -> None:
        self.level = level
        self.context = context  # knows the step, for a backward pass that must be run again
        self.examining = context.examining  # as it was before `install` put a wrapper around it
        self.space = ParkingSpace(context.run)
        self.saved = SavedTensors(self.space, self._make_room_in_backward)
        self.optimizers = OptimizerMemory(self.space, self._stop_copies)
        self.room = RoomMaker(self.saved, self.optimizers)
        self.need = Need(self.saved, self.optimizers)
        self.in_parts = CrossEntropyInParts()
        self.workspaces = Workspaces()
        self.saved.backward.with_any_kernel = self.workspaces.with_any_kernel
        self.recipes = Recipes(self.saved, self.workspaces)
        self.backward_room = BackwardRoom(self.room, self.saved, self.in_parts)
        self.guard = Guard(self)
        self.is_updating = False
        self.is_up = False
        self.graphs_run = 0  # backward passes that have begun
        self.random = RandomNumbers()
        self._tell = tell
        self._updates = 0
        self._due = 0.0
        self._is_update_safe = False
        self._is_lowered = False  # for an update
        self._is_resting = False  # nothing but the looks at the memory is in place
        self.on_rest: Callable[[], None] = lambda: None
        self.on_wake: Callable[[], None] = lambda: None
        self.compiles = False
        self.refused_step = -1  # in which a refusal was told
        self._had_recovery = False  # in this step
        self._refills = 0
        self._searched_by = self._emptied_by = 0  # numbers of backward passes: nothing is left to park in the second
        self._is_unsure = False  # whether the next backward pass has room for its workspaces
        self.splits = SplitCalls(self)
        self.next_steps = NextSteps(self.early_spill, self.splits)

    @property
    def phase(self) -> RecoveryPhase:
        return "update" if self.is_updating else "forward"

    @property
    def step(self) -> int:
        return self.context.clock.step

    def reason_against(self) -> str:
        """Why nothing may be done at the moment; empty if something may."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return ""

    def nothing_left(self) -> str:
        why = f" ({self.room.no_room})" if self.room.no_room else ""
        return f"no memory could be freed that the call does not use itself{why}"

    def nothing_helped(self, error: BaseException) -> None:
        """A call could not be repeated: a call of a module around it may be made in parts, else it is refused."""
        if not self.splits.may_help(error):
            self.refuse(self.phase, self.nothing_left())

    def recovered(
        self, phase: RecoveryPhase, means: Means, call: str, nbytes: int, seconds: float, *, is_avoided: bool = False
    ) -> None:
        keep_blocks_whole()  # the script may have set a limit since it made its optimizer
        self.in_parts.is_on |= means not in ("retry", "kernel")
        self._is_unsure = self._had_recovery = True
        self.next_steps.recovered(phase, means, nbytes)
        recovery = Recovery(
            step=self.step,
            phase=phase,
            means=means,
            call=call,
            bytes=nbytes,
            seconds=round(seconds, 3),
            is_avoided=is_avoided,
        )
        self._tell(recovery)

    @contained("recover.backward_room")
    def make_room_for_backward(self, roots: Iterable[torch.Tensor]) -> None:
        """Park activations if the backward pass would run out of memory."""
        started = time.monotonic()
        with unseen():
            self.space.catch_up()
            parked = self.backward_room.make(roots, self.optimizers.parameters)
            if self._is_unsure:
                nodes = walk(each.grad_fn for each in roots)
                self.workspaces.try_before_use(nodes, self.saved, self._make_room_in_backward)
        if parked:
            self.recovered("backward", "activations", "", parked, time.monotonic() - started, is_avoided=True)
        if self.backward_room.missing:
            started = time.monotonic()
            parked = self.room.park_optimizer(self.backward_room.missing)
            if parked:
                self.recovered("backward", "optimizer", "", parked, time.monotonic() - started, is_avoided=True)

    def _make_room_in_backward(self, wanted: int) -> bool:
        """Park activations while a backward pass runs; whether there is more room now."""
        if self._emptied_by == self.graphs_run:
            return False
        started = time.monotonic()
        with unseen():
            self.space.catch_up()
            parked = self.room.park_saved(2 * wanted, search=self._searched_by != self.graphs_run)
        self._searched_by = self.graphs_run
        if not parked:
            self._emptied_by = self.graphs_run
        if parked:
            self.recovered("backward", "activations", "", parked, time.monotonic() - started, is_avoided=True)
        return bool(parked)

    def refuse(self, phase: RecoveryPhase, reason: str) -> None:
        self.refused_step = self.step
        self._tell(Refusal(step=self.step, phase=phase, reason=reason))

    def bring_back(self, storage: torch.UntypedStorage, busy: frozenset[int]) -> None:
        """Fill the storage of a parked tensor, which others make room for if need be.

        Raises:
            RuntimeError: There is no memory for it.
        """
        while True:
            try:
                with unseen():
                    self.optimizers.bring_back(storage)
                return
            except RuntimeError:
                with unseen():
                    free = self.optimizers.park(1, busy, gradients=self.is_updating)
                if not free:
                    raise
                give_back_caches()

    def optimizer_built(self, optimizer: Any) -> None:
        self.optimizers.built(optimizer)
        keep_blocks_whole()
        if not self.compiles:
            self.raise_guard()
        self.note_random_state()

    def note_random_state(self) -> None:
        """A step or a part of one is over: the next one may begin with these random numbers."""
        if self.is_up:
            self.random.next_part()

    def update_begins(self, _: Any, args: Any, kwargs: Any) -> None:
        self.is_updating = True
        if self.is_up and self._is_update_safe and not self.optimizers.out:
            has_closure = len(args) > 1 or bool(kwargs)
            self._is_lowered = not has_closure and self.lower_guard()

    def update_ended(self, *_: Any) -> None:
        """The weights are updated. With the guard down, nothing was done in the step and nothing is left to do."""
        self.is_updating = False
        if self.is_up or self._is_lowered or self.optimizers.out or time.monotonic() >= self._due:
            self._step_ended()

    @contained("recover.update")
    def _step_ended(self) -> None:
        """Bring gradients back into memory, as backward adds to them unseen, and plan the next step."""
        if self._is_lowered:
            self._is_lowered = False
            self.raise_guard()
        self.note_random_state()
        if self.optimizers.out:
            for storage in self.optimizers.living_out(gradients_only=True):
                self.bring_back(storage, frozenset())
        self._updates += 1
        if refused := self.workspaces.refused_silently():
            self.recovered("backward", "kernel", "convolution", refused, 0.0)
        self._plan()
        now = time.monotonic()
        if self._updates >= _ALWAYS_GUARDED_UPDATES and now >= self._due:
            self._due = now + _LOOK_SECONDS
            needed = bool(self.optimizers.out) or self.next_steps.are_short or self.need.may_not_fit()
            if needed and not self.compiles:
                self.raise_guard()
            else:
                self._stand_down()
            self._is_update_safe = self.room.has_room_for_update()

    def state_wanted(self) -> None:
        """Somebody reads the state of an optimizer, perhaps in another thread: all of it must be in memory."""
        for storage in self.optimizers.living_out():
            self.bring_back(storage, frozenset())

    def compiled(self) -> None:
        """The script uses torch.compile, which would trace the guard."""
        self.compiles = True
        self._stand_down()

    def _stand_down(self) -> None:
        """Take the guard away, with all that only the guard needs."""
        self.lower_guard()
        self.splits.remove()
        self._rests(not self.is_up and not self.need.is_measuring)  # a backward pass measures its graph

    def _rests(self, is_resting: bool) -> None:
        if is_resting is not self._is_resting:
            self._is_resting = is_resting
            (self.on_rest if is_resting else self.on_wake)()

    def raise_guard(self) -> None:
        self._rests(False)
        if not self.is_up:
            self.guard.__enter__()  # type: ignore[no-untyped-call]
            self.is_up = True
            self.splits.install()

    def lower_guard(self) -> bool:
        """Take the guard away, unless a mode of the user's lies above it; whether that was done."""
        if self.is_up and torch.overrides._get_current_function_mode() is self.guard:
            self.guard.__exit__(None, None, None)
            self.is_up = False
            return True
        return False

    def close(self) -> None:
        for storage in self.optimizers.living_out():
            self.bring_back(storage, frozenset())
        self.lower_guard()
        self.splits.remove()

    def _plan(self) -> None:
        """Take out of memory early in the next step what had to be parked in the steps before."""
        in_parts = self.in_parts.possible_bytes if self.in_parts.is_on else 0
        self.in_parts.next_step()
        if self.next_steps.early is not None:
            before, self._refills = self._refills, refills()
            if self._refills > before and not self._is_unsure:
                self.next_steps.was_pressed()
        has_other_plan = self.next_steps.plan(in_parts)
        if has_other_plan:
            self.backward_room.failed()  # the next backward pass computes other tensors again
        self._is_unsure = has_other_plan or self._had_recovery
        self._had_recovery = False
        self.guard.spill = self.next_steps.early
        if self.next_steps.optimizer_bytes:
            with unseen(), contextlib.suppress(OSError):  # caches stay: the next pass takes its memory from them
                self.optimizers.park(self.next_steps.optimizer_bytes, frozenset(), gradients=False)

    def early_spill(self, budget: int) -> EarlySpill:
        """Takes so many bytes of saved tensors out of memory as they are saved."""
        return EarlySpill(self.saved, self.space, self.recipes, budget)

    def _stop_copies(self) -> None:
        """End the copies of optimizer state for a look back: they are made unseen, and would read emptied storages."""
        self.context.rewind.give_up()

    def forked(self) -> None:
        """A forked child trains nothing of the parent's."""
        with contextlib.suppress(Exception):
            self.lower_guard()
