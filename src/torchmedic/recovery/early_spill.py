"""Saved tensors that do not stay in memory, because the steps before ran out of memory with them.

In the first steps, tensors are taken out as they come, and their prices are noted: the time of the call that computes a
tensor again, and the time of its copy. The steps after that follow a plan, which names the saved tensors that go by the
numbers of their nodes in the step. The cheapest ones go first; copies that the forward pass hides cost nothing. Saved
tensors that stay are left to torch, so they cost nothing either.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.contained import contained
from torchmedic.recovery.handles import SavedTensor
from torchmedic.recovery.living_tensors import is_plain, parameter_storages, unseen
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.patterns import Unknown
from torchmedic.recovery.places import Place
from torchmedic.recovery.recipes import Recipes
from torchmedic.recovery.saved_tensors import CAN_TELL, MIN_PARKED_BYTES, SavedTensors
from torchmedic.recovery.spill_plan import MAX_DEPTH, Candidate, Plan, SavedIn, Task

_FORWARD_SHARE = 0.3  # of a step, in which copies run beside the computation
_FILE_SECONDS_PER_BYTE = 1e-9
_LEARNING_STEPS = 2
NEVER = 1 << 62  # no node has this number


class EarlySpill:
    """Takes saved tensors out of memory as they are saved, up to a number of bytes per step."""

    def __init__(self, saved: SavedTensors, space: ParkingSpace, recipes: Recipes, budget: int) -> None:
        self._saved = saved
        self._space = space
        self._recipes = recipes
        self.budget = budget
        self.spilled = 0  # bytes in this step, both copied and dropped
        self._failed = False
        self._kept = parameter_storages()
        self._places: dict[int, tuple[weakref.ref[Place], StorageWeakRef, int]] = {}
        self._steps = 0
        self._plan: Plan | None = None
        self._planned_budget = 0
        self._is_overlapped = False  # whether copies are made beside the computation
        self._began = 0.0
        self._step_seconds = float("inf")  # of the fastest step that followed a plan
        self._first = NEVER  # number of the first node in the step
        self.next = NEVER  # number of the node to look at next
        self._task = 0  # of the plan, to be done next
        self._forget()
        self.next_step()

    def _forget(self) -> None:
        """Forget what was learned in a step."""
        self._tensors: dict[int, SavedIn] = {}  # by their numbers
        self._candidates: list[Candidate] = []
        self._again: dict[int, int] = {}  # saved tensors whose storage was saved before, and the number of the first
        self._depths: dict[int, int] = {}  # of the tensors that were dropped
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}  # storages of the candidates, with their numbers

    def next_step(self) -> bool:
        """Plan the next step by the ones before; whether there is a new plan."""
        now = time.perf_counter()
        before = self._plan
        if self._tensors:
            self._steps += 1
            if before is not None and self._steps > _LEARNING_STEPS + 1:
                self._step_seconds = min(self._step_seconds, now - self._began)
            is_due = before is None or self._planned_budget != self.budget or self._steps == _LEARNING_STEPS + 3
            if self._steps >= _LEARNING_STEPS and is_due:
                # Steps in which prices were noted took longer, so their time says nothing.
                hidden = self._step_seconds * _FORWARD_SHARE if self._step_seconds < float("inf") else 0.0
                self._plan = self._planned(hidden if self._is_overlapped else 0.0, before)
                self._planned_budget = self.budget
            elif before is None:
                self._forget()
        self._began = now
        self.spilled = self._task = 0
        self._places.clear()
        self._noted.clear()
        self._saved.backward.next_step()
        self._first = self.next = torch._C._autograd._get_sequence_nr()
        if self._plan is not None:
            self.next = self._of_next_task(self._plan)
        return self._plan is not before

    def _planned(self, hidden_seconds: float, before: Plan | None) -> Plan:
        plan = Plan(self._candidates, self.budget, hidden_seconds, self._again, self._tensors)
        is_same = before is not None and (plan.dropped, plan.copied) == (before.dropped, before.copied)
        return before if is_same and before is not None else plan

    def called(self, result: Any) -> None:
        """Look at the nodes that a call of torch has made."""
        if type(result) is torch.Tensor:
            try:
                node: Any = result.grad_fn
            except RuntimeError:  # a view whose base was changed in place does not say
                return
            if node is not None and NEVER > node._sequence_nr() >= self.next:
                self._made(node, result)
        elif type(result) in (tuple, list):
            for each in result:
                self.called(each)

    @contained("recover.saved")
    def _made(self, node: Any, result: torch.Tensor) -> None:
        with unseen(), contextlib.suppress(RuntimeError, MemoryError, OSError):
            if self._plan is None:
                self._learn(node, result)
            else:
                self._follow(self._plan, node, result)

    def _new_nodes(self, node: Any) -> dict[int, Any]:
        """The nodes behind a result that were made since the last one was looked at, oldest first, by their numbers."""
        found: dict[int, Any] = {}
        pending = [node]
        while pending:
            each = pending.pop()
            number = each._sequence_nr()
            if self.next <= number < NEVER and number not in found:
                found[number] = each
                pending += [before for before, _ in each.next_functions if before is not None]
        return dict(sorted(found.items()))

    def _learn(self, node: Any, result: torch.Tensor) -> None:
        """Note the prices of tensors, and take them out while the step is above its budget."""
        nodes = self._new_nodes(node)
        self.next = node._sequence_nr() + 1
        for number, each in nodes.items():
            for name, index, tensor in list(self._saved.natives(each)):
                original = _original(tensor, each, result)
                if tensor.nbytes < MIN_PARKED_BYTES or self._failed or not is_plain(tensor) or original is None:
                    continue
                key = len(self._tensors) + 1
                self._tensors[key] = SavedIn(number - self._first, name, index)
                place = self._learned(tensor, key)
                if place is not None:
                    self._saved.put(each, name, index, SavedTensor(tensor, self._saved.backward, place, original))

    def _known_place(self, tensor: torch.Tensor) -> Place | None:
        """The place of a tensor whose storage has gone before."""
        place, storage, version = self._places.get(int(tensor.untyped_storage()._cdata), (None, None, -1))
        if place is None or storage is None or storage.expired() or version != tensor._version:
            return None
        return place()

    def _learned(self, tensor: torch.Tensor, number: int) -> Place | None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        noted = self._noted.get(key)
        if noted is not None and not noted[0].expired():  # a storage that was saved before
            self._again[number] = noted[1]
            return self._known_place(tensor)
        if key in self._kept:
            return None
        self._noted[key] = (StorageWeakRef(storage), number)
        copy_seconds = self._copy_seconds(storage)
        base = _base(tensor)
        with self._saved.backward.nothing_held():
            pattern = self._recipes.pattern_for(base)
        recipe, seconds = None, None
        sources: tuple[int, ...] = ()
        if pattern is not None:
            seconds = pattern.seconds
            recipe = pattern.bound(base.grad_fn, self._saved)
            sources = tuple(found for each in recipe.sources() if (found := self._number_of(each)) is not None)
        self._candidates.append(Candidate(number, storage.nbytes(), seconds, copy_seconds, pattern, sources))
        if self.spilled >= self.budget:
            return None
        depth = max((1 + self._depths[each] for each in sources if each in self._depths), default=0)
        place = Place(storage, self._saved.backward, number)
        if recipe is not None and seconds is not None and seconds <= copy_seconds and depth < MAX_DEPTH:
            place.drop(recipe)
            self._depths[number] = depth
        else:
            self._copy(place, storage)
        self._gone(place, tensor)
        return place

    def _number_of(self, saved: SavedTensor) -> int | None:
        """The number of the first saved tensor in a storage of this step, which may be gone."""
        if saved.place is not None and saved.place.number:
            return saved.place.number
        weak, number = self._noted.get(saved.key, (None, None))
        return None if weak is None or weak.expired() else number

    def _gone(self, place: Place, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._places[int(storage._cdata)] = (weakref.ref(place), StorageWeakRef(storage), tensor._version)
        self.spilled += place.nbytes

    def _of_next_task(self, plan: Plan) -> int:
        """The number of the node that the next task is about."""
        return self._first + plan.tasks[self._task].saved.node if self._task < len(plan.tasks) else NEVER

    def _follow(self, plan: Plan, node: Any, result: torch.Tensor) -> None:
        """Do what the plan says about the nodes that were made."""
        last = node._sequence_nr()
        nodes = {last: node}
        if self.next != last:
            nodes = self._new_nodes(node)
        while self.next <= last:
            owner, task = nodes.get(self.next), plan.tasks[self._task]
            self._task += 1
            if owner is None or not self._done(task, owner, result):  # another step than the planned one
                self._plan, self._steps, self.next = None, 0, last + 1
                self._step_seconds = float("inf")
                self._forget()
                return
            self.next = self._of_next_task(plan)

    def _done(self, task: Task, node: Any, result: torch.Tensor) -> bool:
        """Do a task; False if the step is not the planned one."""
        backward = self._saved.backward
        _, name, index = task.saved
        tensor = self._saved.native(node, name, index)
        if tensor is None:
            return False
        original = _original(tensor, node, result)
        if original is None:
            return False
        place = None
        if task.nbytes:
            storage = tensor.untyped_storage()
            if storage.nbytes() != task.nbytes:
                return False
            place = Place(storage, backward)
            if task.pattern is None:
                self._copy(place, storage)
            else:
                base = _base(tensor)
                if (tuple(base.shape), base.stride(), base.nbytes) != task.pattern.layout:
                    return False
                try:
                    place.drop(task.pattern.bound(base.grad_fn, self._saved))
                except (Unknown, AttributeError, IndexError):
                    return False
            self._gone(place, tensor)
        else:
            place = self._known_place(tensor)
        if place is not None or task.freed is not None:
            saved = SavedTensor(tensor, backward, place, original)
            saved.freed = task.freed
            self._saved.put(node, name, index, saved)
        return True

    def _copy_seconds(self, storage: torch.UntypedStorage) -> float:
        copies = self._space.copies(storage.device)
        if copies is None:
            return _FILE_SECONDS_PER_BYTE * storage.nbytes()
        self._is_overlapped = True
        return copies.seconds_per_byte * storage.nbytes()

    def _copy(self, place: Place, storage: torch.UntypedStorage) -> None:
        try:
            # Where a change in place would not be seen, it must not come before the end of the copy.
            place.copy_out(storage, self._space, overlapped=CAN_TELL)
        except OSError:
            self._failed = True
            raise


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the whole storage."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _original(tensor: torch.Tensor, node: Any, result: torch.Tensor) -> torch.Tensor | None:
    """The tensor of the script that a node has saved; None if it cannot be told, and so not be watched for changes."""
    if tensor.grad_fn is not node:
        return tensor
    return result if result.grad_fn is node and result.output_nr == tensor.output_nr else None
