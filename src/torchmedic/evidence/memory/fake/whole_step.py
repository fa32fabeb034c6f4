"""A whole step on fake tensors, as it is or changed: forward, backward, and the update of the weights."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from torchmedic.evidence.memory.fake.fake_step import FakeRunner, counted_by, device_left_alone, untouched
from torchmedic.evidence.memory.fake.optimizer_updates import stepping_on_fakes, update
from torchmedic.evidence.memory.fake.peak import Counting, Fakes, LiveBytes
from torchmedic.evidence.memory.fake.rows import Rows, fewer
from torchmedic.observe.step.tensors import parameters_of, tensors_in
from torchmedic.replay.fake.changes import backward_without_autocast
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.sandbox import GRACE, ReplayTooLong, ReplayWaits, harmless
from torchmedic.replay.isolation.torch_state import muted
from torchmedic.replay.step.prepared_names import SegmentEnd
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.step.side_effects import no_side_effects
from torchmedic.replay.step.trial import Edit
from torchmedic.source.assignments import names_read, names_written, read_first
from torchmedic.source.objects.graph import is_leaf

Wanted = Callable[[torch.device], bool]


class Cut(NamedTuple):
    """Tensors of earlier steps, replayed without the graphs behind them, and the advice that does so."""

    tensors: tuple[torch.Tensor, ...]
    advice: str


class Rewritten(NamedTuple):
    """Other source for a line of the step, and what it does."""

    edit: Edit
    advice: str


class Change(NamedTuple):
    """A change of the step, to be tried."""

    rows: Rows | None = None
    autocast: str = ""  # the kind of device
    checkpointed: tuple[torch.nn.Module, ...] = ()
    grad: bool | None = None
    cut: Cut | None = None
    rewritten: Rewritten | None = None
    updates: bool = True  # whether the optimizers step at the end


class NotRows(Exception):
    """What the model is called with is not a batch of rows."""


class WholeStep(FakeRunner):
    """Plays a segment to its end and follows every byte.

    What the step before has left is played along: tensors in variables that are about to be assigned anew, and the
    gradients, where these are there. They go when the step lets go of them.
    """

    wanted: Wanted
    fakes: Fakes
    accumulates: bool  # whether the gradients that are there now were there at the beginning

    @classmethod
    def on(cls, runner: Runner, wanted: Wanted, *, accumulates: bool) -> WholeStep:
        made = cls.__new__(cls)
        made.__dict__.update(runner.__dict__)
        made.wanted = wanted
        made.accumulates = accumulates
        made.fakes = Fakes()
        return made

    @property
    def clears_gradients(self) -> bool:
        """Whether the step clears gradients; if so, it begins with the gradients of the step before."""
        nodes = (node for statement in self.segment.statements for node in ast.walk(statement))
        return any(isinstance(node, ast.Attribute) and node.attr == "zero_grad" for node in nodes)

    @property
    def first_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Leaves that have a gradient when the step begins, each with a tensor of that size."""
        if self.clears_gradients:
            trained = {id(each): each for each in self.parameters if is_leaf(each) and each.requires_grad}
            return [(leaf, leaf) for leaf in trained.values()]
        if not self.accumulates:
            return []
        return [(leaf, leaf.grad) for leaf in self.leaves if leaf.grad is not None]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All tensors that may have a gradient."""
        found = [*self.parameters, *self.loose_leaves, *(each for root in self.modules for each in root.parameters())]
        return list({id(each): each for each in found if is_leaf(each)}.values())

    @property
    def later_gradients(self) -> int:
        """Bytes of gradients that a step finds if it comes to accumulate them, and this one did not."""
        known = set() if self.clears_gradients else {id(leaf) for leaf, _ in self.first_gradients}
        trained = {id(each): each for each in self.parameters if each.requires_grad and self.wanted(each.device)}
        return sum(each.nbytes for key, each in trained.items() if key not in known)

    def left_over(self) -> dict[str, list[torch.Tensor]]:
        """Tensors in variables that the step assigns before it reads them, by name."""
        namespace = self._namespace()
        statements = self.segment.statements
        written = {name for statement in statements for name in names_written(statement)} - read_first(statements)
        held = {name: tensors_in(namespace[name]) for name in written if name in namespace}
        return {
            name: kept
            for name, tensors in held.items()
            if (kept := [each for each in tensors if not (is_leaf(each) and each.requires_grad)])
        }

    def replaced(self) -> list[torch.Tensor]:
        """Tensors in variables that the replay begins with another value in, as the step has overwritten them since."""
        namespace = self._namespace()
        stale = [value for name, value in self._locals.items() if namespace.get(name) is not value]
        return [tensor for value in stale for tensor in tensors_in(value)]

    def count(self, change: Change, deadline: float) -> Counting:
        """Play the step. Raises an exception if fakes cannot follow it, or not in time."""
        ledger = Counting(self.fakes, self.names(), deadline, LiveBytes(self.wanted))
        left = self.left_over()
        with contextlib.ExitStack() as stack:
            stack.enter_context(muted())
            stack.enter_context(harmless(self._frame))
            stack.enter_context(untouched(self.modules, [*self.parameters, *self.loose_leaves], self._optimizers))
            stack.enter_context(device_left_alone())
            namespace = self._changed(stack, change, ReplayResult(), left, keep_rng=False)
            for optimizer in self._optimizers:
                stack.enter_context(stepping_on_fakes(optimizer, ledger))
            stack.enter_context(counted_by(ledger, self.fakes.mode, self.modules))
            self._lay_out(namespace, left, change.rows)
            with contextlib.suppress(SegmentEnd), Alarm(deadline + GRACE, ReplayTooLong, ReplayWaits):
                self._run(namespace, change.rows)
            ledger.end_course()
            if change.updates and not ledger.has_updated:
                self._update(ledger)
        return ledger

    def _changed(
        self, stack: contextlib.ExitStack, change: Change, played: ReplayResult, left: Iterable[str], *, keep_rng: bool
    ) -> dict[str, Any]:
        """Enter what changes the step; the variables that it begins with, without those left over.

        Must be called where `untouched` puts everything back.
        """
        namespace = self._namespace()
        for name in left:
            namespace.pop(name)
        batch = self._batch
        if change.rows is not None:
            read = {name for statement in self.segment.statements for name in names_read(statement)}
            namespace |= {name: fewer(namespace[name], change.rows) for name in read & namespace.keys()}
            batch = fewer(batch, change.rows)
            stack.enter_context(_given_fewer(self.modules, change.rows))
        if change.autocast:
            stack.enter_context(backward_without_autocast(change.autocast))
        stack.enter_context(no_side_effects(played, self._optimizers, batch, backward=True, keep_graphs=False))
        for module in change.checkpointed:
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=keep_rng
            )
        stack.enter_context(torch.set_grad_enabled(self._notes.grad_enabled if change.grad is None else change.grad))
        for device, dtype in self._notes.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        if change.autocast:
            stack.enter_context(torch.autocast(change.autocast, dtype=torch.bfloat16))
        return namespace

    def _lay_out(self, namespace: dict[str, Any], left: dict[str, list[torch.Tensor]], rows: Rows | None) -> None:
        """The variables before the first statement, as fakes that can be freed."""
        gradients = self.first_gradients
        for leaf in self.leaves:
            leaf.grad = None
        for leaf, like in gradients:
            if like.layout is torch.strided:
                leaf.grad = _stand_in(like, None)
        for name, tensors in left.items():
            namespace[name] = [_stand_in(each, rows) for each in tensors if self.wanted(each.device)]

    def _run(self, namespace: dict[str, Any], rows: Rows | None) -> None:
        def cut(statement: ast.stmt) -> None:
            """Data that the step itself has made."""
            if rows is not None and isinstance(statement, ast.Assign | ast.AnnAssign):
                for name in set(names_written(statement)) & namespace.keys():
                    namespace[name] = fewer(namespace[name], rows)

        self._execute_fake(namespace, cut)

    def _update(self, ledger: Counting) -> None:
        for optimizer in self._optimizers:
            trained = parameters_of(optimizer)
            if not any(tensor.grad is not None for tensor in trained):
                continue
            try:
                update(optimizer, ledger)
            except Exception:
                if not optimizer.state:
                    raise  # what its first step leaves behind is not known


def _has_others(tensor: torch.Tensor, rows: Rows) -> bool:
    """Whether a tensor holds indices that are not one per row."""
    index = tensor.dtype in (torch.int64, torch.int32) and tensor.numel() > 1
    return index and tensor.shape[0] != rows.kept


def _stand_in(tensor: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    """A fake of its own with the memory that a tensor has."""
    shape = list(tensor.shape)
    if rows is not None and shape and shape[0] == rows.of:
        shape[0] = rows.kept
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


@contextlib.contextmanager
def _given_fewer(modules: list[torch.nn.Module], rows: Rows) -> Iterator[None]:
    """Models get fewer rows, also of what is made in the very call."""

    def cut(module: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(fewer(each, rows) for each in args)
        kwargs = {name: fewer(each, rows) for name, each in kwargs.items()}
        given = tensors_in([*args, *kwargs.values()], 3)
        if any(True for _ in module.parameters()) and any(_has_others(each, rows) for each in given):
            raise NotRows("there are indices beside the rows")  # the edges of a graph, say
        return args, kwargs

    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
