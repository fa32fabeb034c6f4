"""Run a segment once more: same values, same random numbers, no side effect that outlives it."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.autograd.graph
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_pre_hook

from torchmedic.observe.context import Notes
from torchmedic.observe.numbers.func_losses import is_trained
from torchmedic.observe.step.step_notes import released
from torchmedic.observe.step.tensors import parameters_of, tensors_in
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.endings import let_go
from torchmedic.replay.isolation.outside_world import Refused, refusals, unfilled
from torchmedic.replay.isolation.redraws import redrawn
from torchmedic.replay.isolation.sandbox import (
    GRACE,
    SHADOW_LIMIT,
    WALL_FACTOR,
    Bounds,
    ReplayTooBig,
    ReplayTooLong,
    ReplayWaits,
    check_memory,
    harmless,
    time_limit,
)
from torchmedic.replay.isolation.torch_state import muted, preserved, rewind_rng
from torchmedic.replay.shadow.cpu_shadow import Shadow
from torchmedic.replay.shadow.fake_cuda import shaded
from torchmedic.replay.step.moved_modules import put_back
from torchmedic.replay.step.prepared_names import NAMES, SegmentEnd, Waits
from torchmedic.replay.step.result import ReplayResult, start_of
from torchmedic.replay.step.reused_results import bind_batch, draws_from_iterator, is_on_device, reusable_result
from torchmedic.replay.step.sharded_modules import unsharded
from torchmedic.replay.step.side_effects import RestoreWrites, no_side_effects
from torchmedic.source.assignments import names_read, names_written, read_first
from torchmedic.source.lookup.failing_call import lost_arguments
from torchmedic.source.objects.graph import is_leaf
from torchmedic.source.segment.cut import Segment
from torchmedic.source.user_code import is_user_file


class Runner:
    """Replays one segment as often as wanted."""

    def __init__(
        self,
        segment: Segment,
        frame: FrameType,
        notes: Notes,
        *,
        optimizers: Sequence[Any] = (),
        batch: Any = None,
        target: ast.expr | None = None,
        usual_step: float = 0.0,
    ) -> None:
        self._seconds = time_limit(usual_step)
        self.segment = segment
        self._frame = frame
        self._notes = notes
        self._optimizers = list(optimizers)
        self._batch = batch
        self._target = target
        self._locals = dict(frame.f_locals)
        self._arguments = lost_arguments(frame, segment.statements)
        self._module_calls = 0
        self._waits = False  # it has been seen that it waits for ever
        self.frozen: set[tuple[int, int]] = set()  # statements that are not run again: their result is taken over
        self.takes_over = False  # whether calls that leave torch are not made again either, where that can be
        self.ends_at_exchange = False  # whether the step ends where gradients are exchanged with other ranks by hand
        self.answers_exchanges = False  # whether this rank stands in for the others where they are asked before that
        self.thorough = 0.0  # seconds in which the replay makes sure that it leaves nothing behind, or else raises
        self.seed: int | None = (
            None  # of the user's own random generators, where other draws than the step's are wanted
        )
        self.shadow: Shadow | None = None  # runs the step on the CPU, where its device is lost

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(*self._optimizers)

    @property
    def loose_leaves(self) -> list[torch.Tensor]:
        """Tensors that are trained but belong to no optimizer: variables of a loop that updates them by hand."""
        return [
            tensor
            for value in [*self._locals.values(), *self._frame.f_globals.values()]
            for tensor in tensors_in(value, 2)
            if (tensor.requires_grad and is_leaf(tensor)) or is_trained(tensor)
        ]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules in reach of the frame: in its variables, and in the objects whose methods run."""
        found: dict[int, torch.nn.Module] = {}
        for value in [*self._locals.values(), *self._frame.f_globals.values()]:
            owners = [value]
            if isinstance(value, ModuleType) and not is_user_file(getattr(value, "__file__", None) or ""):
                continue  # thousands of names of torch, in every replay
            if hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
                with contextlib.suppress(Exception):
                    owners += list(vars(value).values())
            for owner in owners:
                # The type is asked, as some objects of torch.distributed warn when `__class__` is read.
                if issubclass(type(owner), torch.nn.Module):
                    found[id(owner)] = owner
        return list(found.values())

    def play(
        self,
        *contexts: AbstractContextManager[Any],
        change: Callable[[dict[str, Any]], None] | None = None,
        replace: dict[int, Any] | None = None,
        backward: bool = True,
        keep_graphs: bool = True,
    ) -> ReplayResult:
        """Run the segment.

        Args:
            contexts: Entered around it, the microscope for example.
            change: Given the variables before the first statement, for a trial.
            replace: Code objects to run in place of statements, by line, for a trial.
            backward: Whether backward calls are carried out, or only noted.
            keep_graphs: Whether every backward keeps its graph, or only where the code says so.
        """
        played = ReplayResult(answers=self.answers_exchanges)
        namespace = self._namespace()
        if change is not None:
            change(namespace)
        started, calls = time.monotonic(), self._module_calls
        try:
            check_memory()
            if self._waits:
                raise ReplayWaits
        except (ReplayTooBig, ReplayWaits) as error:
            played.error = error
            return played
        with muted(), contextlib.ExitStack() as stack:
            stack.enter_context(harmless(self._frame, thorough=self.thorough)).guard(namespace)
            played.stood_in = stack.enter_context(unsharded(self.modules))
            if self.shadow is None:
                stack.enter_context(put_back(self.modules))
                self._preserve(stack)
            stack.enter_context(
                no_side_effects(played, self._optimizers, self._batch, backward=backward, keep_graphs=keep_graphs)
            )
            stack.callback(register_module_forward_pre_hook(self._count_call).remove)
            stack.enter_context(torch.set_grad_enabled(self._notes.grad_enabled))
            if self.shadow is not None:
                stack.enter_context(shaded(self.shadow, self._notes))
            else:
                rewind_rng(self._notes)
            if self.seed is not None:
                stack.enter_context(redrawn(namespace, self.seed))
            for device, dtype in self._notes.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            seconds = self._seconds if self.shadow is None else SHADOW_LIMIT
            deadline = time.monotonic() + WALL_FACTOR * seconds
            bounds = stack.enter_context(Bounds(seconds))
            for context in contexts:
                stack.enter_context(context)
            try:
                with Alarm(deadline + GRACE, ReplayTooLong, ReplayWaits):
                    self._execute(namespace, played, replace or {})
            except SegmentEnd:
                pass
            except Exception as error:
                is_over = bounds.met_collective and isinstance(error, Refused) and bool(played.backward_calls)
                if not (is_over and self.ends_at_exchange):
                    played.error = error
                self._waits = isinstance(error, ReplayWaits)
            played.exchanged = bounds.met_collective and bool(played.backward_calls)
            if not contexts:
                try:
                    played.judge(self.parameters)
                except (ReplayTooLong, ReplayTooBig) as error:
                    played.error = played.error or error
            let_go(namespace, self._known)
        played.seconds, played.module_calls = time.monotonic() - started, self._module_calls - calls
        played.namespace = namespace
        return played

    def _preserve(self, stack: contextlib.ExitStack) -> None:
        trained = [*self.parameters, *self.loose_leaves]
        stack.enter_context(preserved(self.modules, trained))
        stack.enter_context(RestoreWrites([*trained, *(each for root in self.modules for each in root.parameters())]))

    def _count_call(self, module: Any, args: Any) -> None:
        self._module_calls += 1

    def _execute(self, namespace: dict[str, Any], played: ReplayResult, replace: dict[int, Any]) -> None:
        results: set[str] = set()  # names of what the model computed, and of what was computed from that
        for statement, code in self.segment.code():
            if start_of(statement) in self.frozen or draws_from_iterator(statement, namespace):
                namespace.update(self._frozen_results(statement))
                continue
            taken = reusable_result(statement, self.segment.statements, self._known) if self.takes_over else None
            if taken is not None and not (self.shadow is not None and is_on_device(taken)):
                namespace.update(taken)
                played.taken.update(taken)
                continue
            before = (torch.get_rng_state(), _get_sequence_nr(), self._module_calls)
            if not self._run_statement(statement, replace.get(statement.lineno, code), namespace):
                self._fill(statement, namespace, played)
                continue
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            # Data that was drawn at random can be taken over; what a model computed from it cannot.
            computed = (_get_sequence_nr(), self._module_calls) != before[1:] or not results.isdisjoint(
                names_read(statement)
            )
            if computed:
                results.update(names_written(statement))
            else:
                played.made_data.add(start_of(statement))
            if not computed and not torch.equal(before[0], torch.get_rng_state()):
                played.drew_random.add(start_of(statement))

    def _run_statement(self, statement: ast.stmt, code: Any, namespace: dict[str, Any]) -> bool:
        """Run one statement; False where the step goes on without it.

        Raises:
            Exception: What it raised, or that it reaches outside and computes something too.
        """
        before = (refusals(), _get_sequence_nr(), self._module_calls)
        try:
            exec(code, namespace)
        except Waits:
            return False  # what was waited for has come, and its name still holds it
        except SystemExit as end:
            raise RuntimeError("the step ends the program") from end
        except Exception:
            if refusals() == before[0] or (_get_sequence_nr(), self._module_calls) != before[1:]:
                raise
            taken = reusable_result(statement, self.segment.statements, self._known)
            if taken is None and not (isinstance(statement, ast.Expr) and statement is not self.segment.statements[-1]):
                raise
            namespace.update(taken or {})
            return False
        return True

    def _fill(self, statement: ast.stmt, namespace: dict[str, Any], played: ReplayResult) -> None:
        """Give a tensor the message of another rank that the step got in it."""
        asked, known = {id(each) for each in unfilled()}, self._known
        for name in names_read(statement):
            tensor, got = namespace.get(name), known.get(name)
            if tensor is None or id(tensor) not in asked:
                continue
            if isinstance(got, torch.Tensor) and got.shape == tensor.shape:
                tensor.data.copy_(got.data)
                played.received[got.data_ptr()] = statement

    def _frozen_results(self, statement: ast.stmt) -> dict[str, Any]:
        """What a statement that is not run again gave, where the variables do not hold it already."""
        return {}

    @property
    def _known(self) -> dict[str, Any]:
        """The variables of the frame as they are now."""
        return {**self._frame.f_globals, **self._locals}

    def _namespace(self) -> dict[str, Any]:
        namespace = {**self._frame.f_globals, **self._locals, **self._arguments}
        if self._notes.carried_frame == id(self._frame):
            # Of a loop around the segment's own, the names that are assigned before they are read mean nothing here.
            wanted = read_first(self.segment.statements)
            for name, value in self._notes.carried.items():
                back = released(value) if name in wanted else None
                if back is not None:
                    namespace[name] = back
        if self._batch is not None and self._target is not None:
            bind_batch(namespace, self._target, self._batch)
        if self.shadow is not None:
            namespace = {name: self.shadow.answer_variable(value) for name, value in namespace.items()}
        return namespace | NAMES
