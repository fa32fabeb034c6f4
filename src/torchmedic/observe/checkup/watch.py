"""The check-up of the first steps: each call of backward in the user's code is looked at once, in place.

From the start of the process until the first backward, the births of graph nodes are noted (`node_births`); when
backward is called, the graph is taken down (`loss_graph`), and after the step it is judged with the gradients that came
out. A line that calls backward for the first time in a later step is looked at in the step after that. What looks
suspicious but may pass, such as a layer that lets no gradient through, is looked at in two more steps. After that there
is nothing left of all this but one look at a set per backward. When the phase of the training changes (another
optimizer, layers that are thawed), all lines are looked at again; and so they are a few times late in a long run, as a
layer may die after it has learned. A step of compiled code is looked at in a replay (`compiled_look`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.compiled_look import eager_cuts, eager_graph, graph_with_dead_ends
from torchmedic.observe.checkup.dead_ends import DeadEnds, unmoved
from torchmedic.observe.checkup.graph_facts import all_zero, is_blocked
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import gradient_call
from torchmedic.observe.checkup.node_births import NodeBirths
from torchmedic.observe.checkup.phases import Phases
from torchmedic.observe.checkup.remarkable import is_remarkable
from torchmedic.observe.checkup.term_watch import TermWatch
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.checkup.zero_weights import identical_units, note_zero_weights
from torchmedic.observe.device.device_waits import DeviceWaits
from torchmedic.observe.loop.evaluation import Evaluation
from torchmedic.observe.numbers.finite_checks import are_plain
from torchmedic.observe.step.tensors import parameters_of

if TYPE_CHECKING:
    from torchmedic.observe.silent_watch import Suspicions

_MAX_ARMED = 40  # times that births are noted
_MAX_LOOKS = 3  # at a line that shows something suspicious
_STEPS_BEFORE_LAST_LOOK = 3
_MAX_SITES = 8  # lines that call backward
_MAX_COMPILED_SITES = 3  # lines that call backward for compiled code
_STEPS_BETWEEN_QUESTIONS = 32  # for the parameters that are trained


class Checkup:
    """Fed by the hooks."""

    def __init__(self, judge: Suspicions) -> None:
        self._judge = judge
        self.on = False
        self.births = NodeBirths()
        self.unreached = Unreached()
        self.terms = TermWatch(judge.check_up)
        self.waits: DeviceWaits | None = None
        self.evaluation: Evaluation | None = None
        self.graphs: list[LossGraph] = []  # of lines that will be looked at again
        self._fresh: list[LossGraph] = []  # of the step under way
        self._awaited: list[LossGraph] = []  # their numbers are on the way from the device
        self._looks: Counter[tuple[str, int]] = Counter()
        self._wanted: set[tuple[str, int]] = set()
        self._due: dict[tuple[str, int], int] = {}  # lines that are to be looked at again from that step on
        self._puzzles: dict[tuple[str, int], list[torch.Tensor]] = {}  # lines, and weights that get no gradient
        self._armed = 0
        self._steps = 0
        self.rests = False  # nothing is under way: a new line or another phase is all that would change that
        self._phases = Phases()
        self._is_compiled = False  # a part of the step

    def start(self) -> None:
        self.on = True
        self._arm()

    def stop(self) -> None:
        """Stop for good."""
        self.on = False
        self._put_back()
        self._fresh.clear()
        self._awaited.clear()

    def pause(self) -> None:
        """A replay is about to run: it is no step."""
        self.births.disarm()
        self.unreached.cuts.disarm()
        self.terms.disarm()

    @property
    def is_armed(self) -> bool:
        """Whether torch is not as it was."""
        others = (self.waits, self.evaluation, self.terms)
        return self.births.armed or self.unreached.cuts.armed or any(one is not None and one.armed for one in others)

    def compiled(self) -> None:
        """Compiled code is about to run, or to be made: nothing of ours may be seen by it."""
        self._is_compiled = True
        self._put_back()

    def _put_back(self) -> None:
        self.births.refuse()
        self.pause()
        if self.waits is not None:
            self.waits.stop()
        if self.evaluation is not None:
            self.evaluation.refuse()

    def _arm(self) -> None:
        if self._armed < _MAX_ARMED and self.births.arm():
            self._armed += 1

    def backward_begins(
        self, roots: Sequence[Any], key: tuple[str, int], frame: FrameType, has_optimizers: bool = True
    ) -> None:
        if self.rests and key in self._looks:
            return
        self.rests = False
        if self._is_compiled:
            self._look_at_compiled(key, frame)
            return
        if key in self._puzzles:
            self._look_for_dead_ends(key, frame)
        self.terms.backward_begins(roots, key, frame)
        if self.unreached.cuts.armed and gradient_call(frame) is None:
            self.unreached.backward_begins(roots)
        was_armed = self.births.armed
        self.births.disarm()
        if self._looks[key] and key not in self._wanted:
            return
        if len(self._looks) > _MAX_SITES or not _is_plain_backward(roots):
            return
        asking = gradient_call(frame)
        if asking is not None and (has_optimizers or asking.f_locals.get("create_graph")):
            return  # a part of a training step; without an optimizer it is the step itself
        if not was_armed:
            self._wanted.add(key)
            if any(isinstance(root, torch.Tensor) and root.grad_fn is not None for root in roots):
                return  # next time; a loss without a graph has no births that could be missed
        self._wanted.discard(key)
        self._looks[key] += 1
        self._fresh.append(LossGraph(self.births, roots, key, self._steps))

    def _look_at_compiled(self, key: tuple[str, int], frame: FrameType) -> None:
        """A backward of compiled code begins: have the step run without the compiler, and look at that."""
        is_due = key not in self._looks or key in self._wanted
        if not self._steps or not is_due or len(self._looks) >= _MAX_COMPILED_SITES or not _is_plain_backward():
            return
        if gradient_call(frame) is not None:
            return
        self._wanted.discard(key)
        self._looks[key] += 1
        rerun = functools.partial(self._judge.run_eagerly, frame)
        graph = eager_graph(rerun, key, self._steps)
        self._fresh += [graph] if graph is not None else []
        missing = [tensor for found in self.unreached.missing if (tensor := found.reference()) is not None]
        if graph is not None and missing and self.unreached.is_open:
            self.unreached.cuts.disarm()
            self.unreached.cuts = eager_cuts(rerun, missing)

    def _look_for_dead_ends(self, key: tuple[str, int], frame: FrameType) -> None:
        """Have the step run again, to see why some weights get a gradient of 0 in each step."""
        self.pause()
        rerun = functools.partial(self._judge.run_eagerly, frame)
        graph = graph_with_dead_ends(rerun, key, self._steps, DeadEnds(self._puzzles.pop(key)))
        if graph is not None:
            self._judge.check_up([graph], frame)

    def backward_ended(self, frame: FrameType, has_optimizers: bool, result: Any = None) -> None:
        if self._fresh and not has_optimizers:
            asked = [one for one in result if isinstance(one, torch.Tensor)] if isinstance(result, tuple) else []
            for graph in self._fresh:
                graph.is_zero = all_zero(asked or (leaf.grad for leaf in graph.leaves()))
            self._fetch()
            self._settle(frame)
        if self._steps == 0 or self._wanted:
            self._arm()

    def step_begins(self, optimizer: Any, has_closure: bool = False) -> None:
        if (
            self.rests
            and self._steps % _STEPS_BETWEEN_QUESTIONS
            and self._phases.knows(optimizer)
            and self.unreached.knows(optimizer)
        ):
            return
        self.rests = False
        if not has_closure:  # else the forward pass is still to come, inside of the step
            self.births.disarm()
        if self._steps % _STEPS_BETWEEN_QUESTIONS == 0 or not self._phases.knows(optimizer):
            self._ask_for_phase(optimizer)
            if self._phases.is_late_look_due(self._steps):
                self._look_again()
        self.unreached.step_begins(optimizer, has_closure=has_closure)
        if self._fresh:
            gradients = [tensor.grad for tensor in parameters_of(optimizer)]
            for graph in self._fresh:
                if graph.is_zero is None and graph.gates():
                    graph.is_zero = all_zero(gradients)
                if not self._phases.late_looks:
                    note_zero_weights(graph, optimizer)
        self.terms.step_begins(optimizer, self._fresh)

    def _ask_for_phase(self, optimizer: Any) -> None:
        """Look at everything again if there is another optimizer, or if other parameters are trained."""
        thawed = self._phases.begun(optimizer, self._steps)
        if thawed is None:
            return
        self._look_again()
        if not self.unreached.missing:
            self.unreached.cuts.disarm()
            self.unreached = Unreached()
            self.unreached.thawed = thawed
            self.unreached.cuts.done = self.births.refused

    def _look_again(self) -> None:
        """Look at all lines that call backward again, from the next step on."""
        if not self.births.refused:
            self._wanted.update(self._looks)
            self._looks.clear()
            self._due.clear()

    def step_ended(self, frame: FrameType) -> None:
        self._steps += 1
        if self.rests:
            return
        if self._fresh:
            for graph in self._fresh:
                if graph.is_zero is None and graph.gates():  # a closure: backward ran inside of the step
                    graph.is_zero = all_zero(leaf.grad for leaf in graph.leaves())
            self._fetch()
        self._settle(frame)
        for key in [key for key, step in self._due.items() if self._steps >= step]:
            del self._due[key]
            self._wanted.add(key)
        if self._wanted:
            self._arm()
        if not self.terms.armed and not self._is_compiled:
            self.unreached.step_ended()
            self._watch_terms()
        if self.waits is not None and not self.waits.over:
            self.waits.step_ended()
        if self.unreached.is_due():
            self._judge.left_out(self.unreached, frame)
        waits = self.waits is not None and not self.waits.over
        is_open = self.unreached.is_open or (self.terms.is_open(self._steps) and not self.births.refused)
        self.rests = not (
            self._wanted or self._due or self._puzzles or self._awaited or self.is_armed or waits or is_open
        )

    def exiting(self) -> None:
        self.pause()
        if self.waits is not None:
            self.waits.stop()
        if self.on:
            self.terms.exiting()
        if self.on and self.unreached.is_due(at_end=True):
            self._judge.left_out(self.unreached, None)

    def _fetch(self) -> None:
        """Have the numbers of the fresh graphs brought to the host. The first steps may wait for them."""
        for graph in self._fresh:
            graph.fetch(may_wait=self._phases.late_looks == 0)
        self._awaited += self._fresh
        self._fresh = []

    def _settle(self, frame: FrameType) -> None:
        """Judge the graphs whose numbers have arrived."""
        if not self._awaited or not all(graph.has_arrived() for graph in self._awaited):
            return
        fresh, self._awaited = self._awaited, []
        for graph in fresh:
            still = unmoved([graph])
            if still and self._looks[graph.key] >= _MAX_LOOKS:
                still = unmoved([*(other for other in self.graphs if other.key == graph.key), graph])
                self._puzzles |= {graph.key: still} if still else {}
            elif (is_blocked(graph) or still or any(identical_units(graph))) and self._looks[graph.key] < _MAX_LOOKS:
                if self._looks[graph.key] < _MAX_LOOKS - 1:
                    self._wanted.add(graph.key)
                else:
                    self._due[graph.key] = self._steps + _STEPS_BEFORE_LAST_LOOK
        fresh = fresh if self.births.refused else self.terms.judged_now(fresh)
        self.graphs.extend(fresh)
        if any(map(is_remarkable, fresh)):
            self._judge.check_up(self.graphs, frame)
        self.graphs = [graph for graph in self.graphs if graph.key in self._wanted or graph.key in self._due]
        self.terms.settled(fresh)
        self._watch_terms()

    def _watch_terms(self) -> None:
        """Watch the terms of a loss in the next step, unless cuts are watched: both replace the same methods."""
        if not self.unreached.cuts.armed and not self.births.refused:
            self.terms.watch()


def _is_plain_backward(roots: Sequence[Any] = ()) -> bool:
    """Whether backward has values, and runs outside of `torch.func`, a dispatch mode and a captured CUDA graph."""
    if not are_plain() or any(getattr(root, "is_meta", False) for root in roots):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
