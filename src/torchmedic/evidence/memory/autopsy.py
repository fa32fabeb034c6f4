"""Who held the memory when it ran out: a table that adds up to what was measured, and what the verdicts ask about.

Nothing here allocates on a device or waits for one. The table is of the moment at which memory ran out; what the
failing operation had made by then, and what went away while the exception unwound, is the difference to now.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from torchmedic.contained import report_fault
from torchmedic.detect.failures.exhaustion import Exhaustion
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory import by_line as by_lines
from torchmedic.evidence.memory import table
from torchmedic.evidence.memory.accounting.book import Book
from torchmedic.evidence.memory.accounting.holder import Found, FoundArray, Holder
from torchmedic.evidence.memory.accounting.measured import Measured, measure, refusal_of
from torchmedic.evidence.memory.accounting.saved_by_graph import sequence_of
from torchmedic.evidence.memory.accounting.walk import held_tensors
from torchmedic.evidence.memory.attempts import callers_of, history_of, is_lent, is_updating, next_node
from torchmedic.evidence.memory.by_line import Layers, Line, Method
from torchmedic.evidence.memory.fake.fake_step import NotPlayed, made_again, play
from torchmedic.evidence.memory.fake.ledger import ByteLedger, Made, Place, Saved
from torchmedic.evidence.memory.retained_graphs import Retained, retained_graphs
from torchmedic.evidence.memory.source.differentiated import Backward, backward_around, is_differentiated
from torchmedic.observe.context import ProcessContext
from torchmedic.replay.step.step import Step
from torchmedic.source.objects.graph import is_leaf
from torchmedic.source.segment.cut import CannotCut, carried_names


class Autopsy:
    """Who holds what, looked up while the frames of the failed step are alive.

    The constructor stores what is known. `look` walks the heap and fills the book; `replay` plays the step on fake
    tensors. `examine_memory` calls both. All properties are computed from what these two have found.
    """

    def __init__(self, evidence: RaisedEvidence, exhaustion: Exhaustion) -> None:
        self.evidence = evidence
        self.exhaustion = exhaustion
        self.agent = evidence.incident.agent
        self.refusal = refusal_of(exhaustion)
        self.since = self.agent.notes.sequence_number if self.agent is not None else 0
        self._nodes_now = _get_sequence_nr()
        # Filled by `look`:
        self.found: list[Found] = []
        self.batch: list[torch.Tensor] = []
        self.book: Book
        self.measured: Measured
        # Filled by `replay`:
        self.step: Step | None = None  # the failing step, if it can be cut
        self.replayed: ByteLedger | None = None  # the step on fake tensors, if they could follow it
        self.why_not_replayed = ""
        self.is_long = False  # to play the step took too long: another try would, too
        self.default_device: torch.device | None = None  # the step had run under `with torch.device(...)`
        self.lost: list[Saved] = []  # saved up to the failure, and freed while the exception unwound
        self.saved_lines: list[Line] = []
        self.method: Method = "live tensors"
        # Filled by `replay_recomputation`:
        self._recomputed: list[Line] | None = None

    def look(self) -> None:
        """Walk the heap: which tensors there are, and who holds them."""
        self.book = Book(self.is_wanted, self._optimizers, self.since)
        arrays: list[FoundArray] = []
        kinds = (None, None) if self.exhaustion.on_device else (arrays, self.book.piles)
        self.found = [*held_tensors(self._frames, self._skipped, *kinds), *self.book.gradients_with_graph()]
        self.batch = self._batch()
        own = {id(part) for optimizer in self._optimizers for part in (optimizer.state, optimizer.param_groups)}
        collected = [each.tensor for each in self.found if each.holder.many and id(each.holder.owner) not in own]
        history = history_of(self.evidence.frames)
        trained = self.agent is not None and self.agent.clock.updates > 0
        self.book.enter_known(self.batch, self._ours(), history, collected, was_trained=trained)
        self.book.enter_graphs()
        self.book.enter_held(self.found)
        self.book.enter_older()
        self.book.enter_rest(arrays)
        self.measured = measure(self.exhaustion, self.book.addresses)

    def replay(self) -> None:
        """Cut the step, play it on fake tensors up to the operation that failed, and find the lines that save most."""
        self.step = self._cut()
        if self.step is not None and not self.in_optimizer:
            self._play(self.step)
        if self.replayed is not None and not self.in_backward:
            failed = self._nodes_now - self.since - 1
            lost = by_lines.lost_lines(self.book.saved, self.since, self.replayed)
            # What the failing operation itself was about to save are its inputs, and they are still there.
            self.lost = [each for each in lost if each.sequence < failed]
        self.saved_lines, self.method = self._lines()

    def replay_recomputation(self) -> list[Line]:
        """In backward, if the graph has kept little: replay what a checkpoint had computed again until the failure."""
        if self._recomputed is None:
            user, asked = self.evidence.user_frame, self.asked or 0
            little = self.in_backward and self.book.total("saved activations") < asked
            self._recomputed = []
            if little and self.step is not None and user is not None:
                self._recomputed = made_again(self.step, asked=asked, line=(user.file, user.line))
        return self._recomputed

    # What the rules ask

    @property
    def process(self) -> ProcessContext:
        return self.evidence.incident.process

    @property
    def in_backward(self) -> bool:
        if self.refusal is not None:
            return bool(self.refusal.node)
        return self.evidence.inside("_engine_run_backward") is not None

    @property
    def in_optimizer(self) -> bool:
        """Whether an optimizer was updating weights, and not calling its closure."""
        return is_updating(self.evidence.frames)

    @property
    def builds_graph(self) -> bool:
        """Whether the failing code was recording for a backward."""
        return bool(self.book.saved) or self._nodes_now > self.since

    @functools.cached_property
    def retained(self) -> list[Retained]:
        """Graphs of earlier steps that somebody holds."""
        return retained_graphs(
            self.found, self.book, self._carried, self._backward, lambda: is_differentiated(callers_of(self.evidence))
        )

    @property
    def failing(self) -> Made | None:
        """The operation that had no memory, as the fake replay found it."""
        return self.replayed.failing if self.replayed is not None else None

    @functools.cached_property
    def forward_place(self) -> Place | None:
        """In backward: the line and layer of the forward operation that was being differentiated."""
        if not self.in_backward or self.replayed is None:
            return None
        aligned = by_lines.Alignment(self.book.saved, self.since, self.replayed)
        if self.refusal is not None and self.refusal.sequence >= 0:
            return aligned.place_of(self.refusal.sequence)
        return aligned.place_of(sequence_of(self.next_node)) if self.next_node is not None else None

    @functools.cached_property
    def next_node(self) -> Any:
        """In backward: the node that was being computed, as far as the graph tells."""
        return next_node(self.evidence, self.book) if self.in_backward else None

    @functools.cached_property
    def rows(self) -> list[table.Row]:
        return list(table.rows_of(self))

    @property
    def called_at(self) -> tuple[str, int] | None:
        """File and line at which the step has called its model."""
        noted = self.process.notes.forward.get(id(self.step.frame)) if self.step is not None else None
        if noted is None or self.step is None or noted[0] is not self.step.frame.f_code:
            return None
        return noted[0].co_filename, noted[1]

    def holders(self) -> list[tuple[Holder, int, int]]:
        return self.book.by_holder()

    def is_of_failing_call(self, holder: Holder) -> bool:
        """Whether a holder is a variable of a function that the failing step had called: it goes with the exception."""
        return holder.in_frame and holder.scope is not self._step_code and not is_lent(holder)

    # How it is found

    def is_wanted(self, device: torch.device) -> bool:
        """Whether a device is the one that has no memory left."""
        if not self.exhaustion.on_device:
            return device.type == "cpu"
        index = self.exhaustion.index
        return device.type == self.exhaustion.where and (index is None or device.index in (None, index))

    @property
    def _optimizers(self) -> list[Any]:
        return list(self.agent.clock.optimizers) if self.agent is not None else []

    @property
    def _frames(self) -> list[FrameType]:
        return [frame.live for frame in reversed(self.evidence.frames)]

    @property
    def _skipped(self) -> list[int]:
        return [id(self), id(self.evidence), id(self.agent), id(self.evidence.incident), id(self.evidence.error)]

    def _batch(self) -> list[torch.Tensor]:
        """The batch as it was loaded, and its copies on the device."""
        loaded = list(self.evidence.incident.batch)
        alike = {(tuple(tensor.shape), tensor.dtype) for tensor in loaded}
        copies = [
            each.tensor
            for each in self.found
            if each.holder.in_frame
            and is_leaf(each.tensor)
            and not each.tensor.requires_grad
            and (tuple(each.tensor.shape), each.tensor.dtype) in alike
        ]
        return [*loaded, *copies]

    def _ours(self) -> list[torch.Tensor]:
        """Copies of weights that torchmedic holds."""
        return self.agent.rewind.copied_values() if self.agent is not None else []

    def _cut(self) -> Step | None:
        try:
            return self.evidence.failing_step()
        except CannotCut as reason:
            self.why_not_replayed = str(reason)
        except Exception as error:
            self.why_not_replayed = f"{type(error).__name__}"
        return None

    @property
    def _step_code(self) -> Any:
        return self.step.frame.f_code if self.step is not None else None

    @functools.cached_property
    def _carried(self) -> frozenset[str]:
        step = self.step
        if step is None:
            return frozenset()
        return carried_names(step.frame, step.segment.lines[1]) | frozenset(self.process.notes.carried)

    @property
    def _backward(self) -> Backward:
        return backward_around(self.step.frame, self.step.segment.lines[1]) if self.step is not None else "never"

    def _play(self, step: Step) -> None:
        """Play a step on fakes; `replayed` stays None where fakes cannot follow it up to the failure."""
        if self.evidence.compiled_frame is not None:
            self.why_not_replayed = "it ran compiled, and keeps other tensors than the code would"
            return
        user, used = self.evidence.user_frame, (memory.device for _, memory in self.book.entries.values())
        try:
            self.replayed, self.default_device = play(
                step,
                next(used, None) if self.exhaustion.on_device else None,
                stop=None if self.in_backward else self._nodes_now - self.since,
                asked=None if self.in_backward else self.asked,
                line=(user.file, user.line) if user is not None else None,
            )
        except NotPlayed as reason:
            self.why_not_replayed, self.is_long = str(reason), reason.is_long

    @property
    def asked(self) -> int | None:
        return self.refusal.asked if self.refusal is not None else self.exhaustion.asked

    def _lines(self) -> tuple[list[Line], Method]:
        """The lines that have saved activations, and how they were found."""
        found, method = by_lines.by_line(self.book.saved, self.since, self.replayed, Layers(self.book.modules))
        if method == "fake replay" and self.replayed is not None and not self.in_backward:
            found = by_lines.merged(found, by_lines.by_replay(self.lost))
        if method == "live graph" and self.replayed is not None:
            self.why_not_replayed = "it came out differently"
        if not self.book.saved:
            method = "live tensors"
            if self.lost:
                found, method = by_lines.by_replay(self.lost), "fake replay"
        return found, method


def examine_memory(evidence: RaisedEvidence) -> Autopsy | None:
    """The autopsy of an exception that says that this process ran out of memory."""
    if evidence.exhaustion is None or evidence.incident.worker is not None:
        return None
    try:
        autopsy = Autopsy(evidence, evidence.exhaustion)
        autopsy.look()
    except Exception as error:
        report_fault("replay.memory", error)  # there is still what the exception itself says
        return None
    try:
        autopsy.replay()
    except Exception as error:
        report_fault("replay.memory", error)  # there is still who holds what
    return autopsy
