"""Run a segment once more: same values, same random numbers, no side effect that outlives it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
from torch._C._autograd import _get_sequence_nr
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.observe.frames import user_frame
from torchmedic.observe.notes import StepNotes, released
from torchmedic.replay.arguments import lost_arguments
from torchmedic.replay.bounds import Bounds, ReplayTooBig, check_memory, time_limit
from torchmedic.replay.graph import leaves_behind
from torchmedic.replay.iterators import draws_from_iterator
from torchmedic.replay.microscope import Spot
from torchmedic.replay.segment import AWAIT, END, Segment, names_read, names_written, read_first
from torchmedic.replay.state import muted, preserved, rewind_rng


class SegmentEnd(Exception):
    """The segment ran into its own `return`, `break` or `continue`."""


class Waits(Exception):
    """A statement awaits something outside of the step."""


class BackwardCall(NamedTuple):
    """One call of backward in a replay: on what, and from which line of the user's."""

    roots: tuple[torch.Tensor, ...]
    spot: Spot | None
    keeps_graph: bool = False  # the code says so
    inputs: tuple[torch.Tensor, ...] = ()  # what `autograd.grad` is asked for


class Played:
    """One replay that is over."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self.backward_calls: list[BackwardCall] = []  # those of the step itself, not of a checkpoint inside one
        self.updates: list[tuple[Any, int]] = []  # optimizers that were stepped, after how many backward calls
        self.returned: list[torch.Tensor] = []  # gradients that `autograd.grad` gave
        self.error: BaseException | None = None
        self.loss: float | None = None
        self.loss_finite = False
        self.gradients_finite: bool | None = None
        self.drew_random: set[int] = set()  # lines of assignments that drew random numbers and computed nothing
        self.seconds = 0.0

    @property
    def roots(self) -> list[torch.Tensor]:
        """Every tensor that backward was called on, in order."""
        return [root for call in self.backward_calls for root in call.roots]


class Runner:
    """Replays one segment as often as wanted."""

    def __init__(
        self,
        segment: Segment,
        frame: FrameType,
        notes: StepNotes,
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
        self.frozen: set[int] = set()  # lines of statements that are not run again: their result is taken over

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [
            tensor for optimizer in self._optimizers for group in optimizer.param_groups for tensor in group["params"]
        ]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules in reach of the frame: in its variables, and in the objects whose methods run."""
        found: dict[int, torch.nn.Module] = {}
        for value in [*self._locals.values(), *self._frame.f_globals.values()]:
            owners = [value]
            if hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
                with contextlib.suppress(Exception):
                    owners += list(vars(value).values())
            for owner in owners:
                if isinstance(owner, torch.nn.Module):
                    found[id(owner)] = owner
        return list(found.values())

    def play(
        self,
        *contexts: AbstractContextManager[Any],
        change: Callable[[dict[str, Any]], None] | None = None,
        replace: dict[int, Any] | None = None,
        backward: bool = True,
        keep_graphs: bool = True,
    ) -> Played:
        """Run the segment.

        Args:
            contexts: Entered around it, the microscope for example.
            change: Given the variables before the first statement, for a trial.
            replace: Code objects to run in place of statements, by line, for a trial.
            backward: Whether backward calls are carried out, or only noted.
            keep_graphs: Whether every backward keeps its graph, or only where the code says so.
        """
        played = Played()
        namespace = self._namespace()
        if change is not None:
            change(namespace)
        started = time.monotonic()
        try:
            check_memory()
        except ReplayTooBig as error:
            played.error = error
            return played
        with contextlib.ExitStack() as stack:
            stack.enter_context(muted())
            stack.enter_context(preserved(self.modules, self.parameters))
            stack.enter_context(self._no_side_effects(played, backward, keep_graphs))
            stack.enter_context(torch.set_grad_enabled(self._notes.grad_enabled))
            for device, dtype in self._notes.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            rewind_rng(self._notes)
            stack.enter_context(Bounds(started + self._seconds))
            for context in contexts:
                stack.enter_context(context)
            try:
                self._execute(namespace, played, replace or {})
            except SegmentEnd:
                pass
            except Exception as error:
                played.error = error
            if not contexts:
                self._judge(played)
        played.seconds = time.monotonic() - started
        played.namespace = namespace
        return played

    def _judge(self, played: Played) -> None:
        """Look at loss and gradients before they are put back."""
        values = [root.detach() for root in played.roots if root.is_floating_point() and root.numel()]
        if values and values[-1].numel() == 1:
            played.loss = float(values[-1].item())
        played.loss_finite = bool(values) and all(_all_finite(value) for value in values)
        leaves = {id(tensor): tensor for tensor in [*self.parameters, *leaves_behind(played.roots)]}
        gradients = [tensor.grad for tensor in leaves.values() if tensor.grad is not None] + played.returned
        played.gradients_finite = all(_all_finite(gradient) for gradient in gradients) if gradients else None

    def _execute(self, namespace: dict[str, Any], played: Played, replace: dict[int, Any]) -> None:
        results: set[str] = set()  # names of what the model computed, and of what was computed from that
        for statement, code in self.segment.code():
            if statement.lineno in self.frozen or draws_from_iterator(statement, namespace):
                continue
            before = (torch.get_rng_state(), _get_sequence_nr(), self._module_calls)
            try:
                exec(replace.get(statement.lineno, code), namespace)
            except Waits:
                continue  # what was waited for has come, and its name still holds it
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            # Data that was drawn at random can be taken over; what a model computed from it cannot.
            computed = (_get_sequence_nr(), self._module_calls) != before[1:] or not results.isdisjoint(
                names_read(statement)
            )
            if computed:
                results.update(names_written(statement))
            if not computed and not torch.equal(before[0], torch.get_rng_state()):
                played.drew_random.add(statement.lineno)

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
            _assign_batch(namespace, self._target, self._batch)
        namespace[END] = SegmentEnd
        namespace[AWAIT] = _run_to_end
        return namespace

    @contextlib.contextmanager
    def _no_side_effects(self, played: Played, backward: bool, keep_graphs: bool) -> Iterator[None]:
        """Backward keeps its graph, updates update nothing, loaders repeat their batch, nothing is saved."""
        engine = torch.autograd.graph._engine_run_backward
        batch = self._batch
        depth = 0

        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                keeps = any(args[1:3])  # retain_graph or create_graph
                inputs = tuple(args[3]) if len(args) > 3 else ()
                played.backward_calls.append(BackwardCall(tuple(t_outputs), _caller(sys._getframe(1)), keeps, inputs))
            wants_result = not kwargs.get("accumulate_grad", True)
            if not backward and not wants_result:
                return None
            arguments = list(args)
            if keep_graphs and len(arguments) > 1:
                arguments[1] = True  # keep the graph: parts of it may still be needed by the real step
            depth += 1
            try:
                result = engine(t_outputs, *arguments, **kwargs)
            finally:
                depth -= 1
            if wants_result and not depth:
                played.returned += [gradient for gradient in result if gradient is not None]
            return result

        def next_batch(iterator: Any) -> Any:
            if batch is None:
                raise StopIteration
            return batch

        scheduler = importlib.import_module("torch.optim.lr_scheduler").LRScheduler

        def count(module: Any, args: Any) -> None:
            self._module_calls += 1

        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(count).remove)
            stack.enter_context(_attribute(torch.autograd, "_engine_run_backward", run_backward))
            stack.enter_context(_attribute(_BaseDataLoaderIter, "__next__", next_batch))
            stack.enter_context(_attribute(scheduler, "step", lambda *args, **kwargs: None))
            stack.enter_context(_attribute(torch, "save", lambda *args, **kwargs: None))
            stack.enter_context(
                _attribute(GradScaler, "step", lambda scaler, optimizer, *args, **kwargs: optimizer.step())
            )
            stack.enter_context(_attribute(GradScaler, "update", lambda *args, **kwargs: None))
            stack.enter_context(_attribute(GradScaler, "unscale_", lambda *args, **kwargs: None))
            with contextlib.suppress(AttributeError, RuntimeError):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for optimizer in self._optimizers:
                stack.enter_context(_instance_attribute(optimizer, "step", _touch(optimizer, played)))
            yield


def _caller(frame: FrameType | None) -> Spot | None:
    user = user_frame(frame)
    if user is None:
        return None
    for index, (line, end_line, column, end_column) in enumerate(user.f_code.co_positions()):
        if index == user.f_lasti // 2:
            return Spot(
                user.f_code.co_filename, line or user.f_lineno, column, end_line, end_column, user.f_code.co_name
            )
    return None


def _all_finite(tensor: torch.Tensor) -> bool:
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return bool(torch.isfinite(values).all().item())


def _touch(optimizer: Any, played: Played) -> Callable[..., Any]:
    """A step that changes no weight but is a write to each of them, as the real one would be."""

    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        played.updates.append((optimizer, len(played.backward_calls)))
        with torch.no_grad():
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.mul_(1)  # bit for bit the same value, one version later
        return loss

    return step


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _instance_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, before)


def _run_to_end(awaitable: Any) -> Any:
    """The result of a coroutine that never really waits."""
    iterator = awaitable.__await__()
    try:
        next(iterator)
    except StopIteration as end:
        return end.value
    raise Waits


def _assign_batch(namespace: dict[str, Any], target: ast.expr, batch: Any) -> None:
    """Bind the loop's names to the batch anew, where the names that were not changed show that it is this batch."""
    candidates = [target]
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        candidates.append(target.elts[1])  # `for i, batch in enumerate(loader)`
    for candidate in candidates:
        trial: dict[str, Any] = {"__batch__": batch}
        assignment = ast.Assign([candidate], ast.Name("__batch__", ast.Load()))
        module = ast.fix_missing_locations(ast.Module([assignment], []))
        try:
            exec(compile(module, "<batch>", "exec"), trial)
        except Exception:
            continue
        trial.pop("__batch__")
        trial.pop("__builtins__", None)
        same_kind = all(
            namespace.get(name) is value
            or (
                type(namespace.get(name)) is type(value)
                and getattr(namespace.get(name), "shape", None) == getattr(value, "shape", None)
            )
            for name, value in trial.items()
        )
        if trial and same_kind:
            namespace.update(trial)
            return
