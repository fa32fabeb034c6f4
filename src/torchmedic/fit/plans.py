"""Ways to make a step fit, each run on fake tensors, with an estimate of its time: the fastest first."""

from __future__ import annotations

import importlib.util
import linecache
import re
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.fit.analysis import alive_at, need_of, replay
from torchmedic.fit.batches import BatchSizes
from torchmedic.fit.cards import Card
from torchmedic.fit.changes import Change
from torchmedic.fit.trials import Trials
from torchmedic.records.fit import KINDS, Edit, Line, Need, Plan, Trace

_FUSED = frozenset("Adam AdamW SGD Adagrad".split())  # optimizers of torch with a fused kernel for CUDA
_MIN_CHUNK_WIDTH = 4096  # a last dimension from here on is that of a vocabulary
_MIN_CHUNK_SHARE = 0.05  # share of the peak
_CHUNKS = 8  # parts in which a loss is computed
_KEPT = ("parameters", "gradients", "optimizer state", "buffers")
_MAX_RUNS = 10
_MAX_MICRO = 64  # micro-batches of one batch
_PASS = "pass {} to the optimizer"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class Lever(NamedTuple):
    """A change with the words for it."""

    title: str
    how: str
    edits: tuple[Edit, ...] = ()
    change: Change = Change()
    expandable: bool = False
    exact: bool = True
    batch: int | None = None  # of one micro-batch


class Planner:
    """Tries levers one by one, then together, until some plan fits."""

    def __init__(self, trials: Trials, trace: Trace, sizes: BatchSizes, card: Card) -> None:
        self._trials = trials
        self._trace = trace
        self._sizes = sizes
        self._card = card
        self._runs = 0

    def plans(self) -> tuple[Plan, ...]:
        """All plans that were tried: those that fit first, the fastest of them first."""
        levers = list(self._levers())
        self._trials.prepare(lever.change for lever in levers if lever.change != Change())
        found = [plan for lever in levers if (plan := self._try(lever)) is not None]
        found += self._estimates()
        found += self._micro_batches(Lever("", ""))
        found += self._together([lever for lever in levers if lever.exact and not lever.change.spill], found)
        return tuple(sorted(found, key=_order))

    def _levers(self) -> Iterator[Lever]:
        trace = self._trace
        yield Lever("expandable segments", f"set {EXPANDABLE} in the environment", expandable=True)
        has_temporaries = any(KINDS[kind] == "temporaries of the optimizer" for kind in trace.kinds)
        for name, line in trace.optimizers[:1] if has_temporaries else ():
            if name in _FUSED:
                edits = (Edit(line, _with_argument(line, "fused=True")),)
                yield Lever(f"{name} with fused=True", _PASS.format("fused=True"), edits, Change(update="fused=True"))
            edits = (Edit(line, _with_argument(line, "foreach=False")),)
            how = _PASS.format("foreach=False")
            yield Lever(f"{name} with foreach=False", how, edits, Change(update="foreach=False"))
        if trace.classes:
            name = max(trace.classes, key=lambda each: trace.classes[each])
            how = f"from torch.utils.checkpoint import checkpoint; call each {name} as "
            how += "checkpoint(layer, *inputs, use_reentrant=False)"
            yield Lever(f"checkpoint each {name}", how, change=Change(checkpointed=name))
        before_backward = (Edit(trace.backward_line),)
        if not trace.autocast:
            how = 'run the forward pass and the loss under torch.autocast("cuda", dtype=torch.bfloat16)'
            yield Lever("bfloat16 autocast", how, before_backward, change=Change(autocast=True), exact=False)
        how = "run the forward pass under torch.autograd.graph.save_on_cpu(pin_memory=True)"
        yield Lever("keep activations on the host", how, before_backward, change=Change(spill=True))

    def _try(self, lever: Lever) -> Plan | None:
        if lever.change == Change() and lever.batch is None:
            need = need_of(self._trace, self._card, expandable=lever.expandable)
            return self._plan(lever, self._trace, need, self._trace.seconds)
        if self._runs >= _MAX_RUNS:
            return None
        self._runs += 1
        trace = self._sizes.run(lever.batch, lever.change) if lever.batch else self._trials.run(lever.change)
        if trace.error:
            return None
        seconds = trace.seconds
        if lever.batch and self._sizes.knob is not None:
            count = -(-self._sizes.knob.current // lever.batch)
            seconds = count * trace.seconds - (count - 1) * trace.update_seconds
        return self._plan(lever, trace, need_of(trace, self._card, expandable=lever.expandable), seconds)

    def _plan(self, lever: Lever, trace: Trace, need: Need, seconds: float) -> Plan:
        edits = lever.edits + ((Edit(trace.changed_line),) if lever.change.checkpointed else ())
        return Plan(
            title=lever.title,
            need=need,
            seconds=seconds,
            how=lever.how,
            edits=tuple(edit for edit in edits if edit.line.file),
            exact=lever.exact,
        )

    def _micro_batches(self, base: Lever) -> list[Plan]:
        """The largest micro-batch that fits, by halves."""
        knob = self._sizes.knob
        if knob is None or knob.current < 2:
            return []
        found: list[Plan] = []
        count = 2
        while count <= min(knob.current, _MAX_MICRO):
            size = -(-knob.current // count)
            if base.change == Change() and not self._sizes.need_at(size, self._card).fits and size > 1:
                count *= 2
                continue
            title = f"{base.title} and " if base.title else ""
            how = f"{base.how}; " if base.how else ""
            lever = base._replace(
                title=f"{title}{count} micro-batches of {size}",
                how=f"{how}batch size {size}, update the weights every {count} batches, divide the loss by {count}",
                edits=(*base.edits, Edit(knob.line, _with_number(knob.line, knob.current, size))),
                change=base.change.with_(accumulate=True),
                batch=size,
            )
            plan = self._try(lever)
            if plan is None:
                break
            found.append(plan)
            if plan.need.fits:
                break
            count *= 2
        return found[-1:]

    def _together(self, levers: list[Lever], alone: list[Plan]) -> list[Plan]:
        """Exact levers together, one more at a time, until they fit; if they never do, with smaller micro-batches."""
        updates = [lever for lever in levers if lever.change.update]
        chosen = [lever for lever in levers if not lever.change.update] + updates[:1]
        if len(chosen) < 2:
            return []
        change, title, how = Change(), list[str](), list[str]()
        edits: tuple[Edit, ...] = ()
        found: list[Plan] = []
        base = Lever("", "")
        for lever in sorted(chosen, key=lambda each: bool(each.change.checkpointed)):
            fields = lever.change
            change = change.with_(
                update=change.update or fields.update, checkpointed=change.checkpointed or fields.checkpointed
            )
            title.append(lever.title)
            how.append(lever.how)
            edits += lever.edits
            base = Lever(", ".join(title), "; ".join(how), edits, change, expandable=True)
            plan = self._try(base) if len(title) > 1 else None
            if plan is not None:
                found.append(plan)
                if plan.need.fits:
                    return found[-1:]
        fits = any(plan.need.fits and plan.exact and not plan.estimate for plan in alone)
        return found[-1:] + ([] if fits else self._micro_batches(base))

    def _estimates(self) -> list[Plan]:
        """Changes that cannot be tried without other code, estimated from the course as it is."""
        return [*self._chunked_loss(), *self._small_state()]

    def _chunked_loss(self) -> Iterator[Plan]:
        trace = self._trace
        alive = alive_at(trace, replay(trace).peak)
        widths: dict[int, int] = {}
        for number in alive:
            if trace.widths[number] >= _MIN_CHUNK_WIDTH and KINDS[trace.kinds[number]] not in _KEPT:
                widths[trace.widths[number]] = widths.get(trace.widths[number], 0) + trace.sizes[number]
        if not widths:
            return
        width = max(widths, key=lambda each: widths[each])
        if widths[width] < _MIN_CHUNK_SHARE * sum(trace.sizes[number] for number in alive):
            return
        sizes = [
            size // _CHUNKS if wide == width and KINDS[kind] not in _KEPT else size
            for size, wide, kind in zip(trace.sizes, trace.widths, trace.kinds, strict=True)
        ]
        line = max(
            (number for number in alive if trace.widths[number] == width), key=lambda number: trace.sizes[number]
        )
        how = f"the results of width {width} take most: compute the last layer and the loss in {_CHUNKS} parts "
        how += "(torch.nn.functional.linear_cross_entropy, or a loop with checkpoint)"
        yield Plan(
            title=f"loss in {_CHUNKS} chunks",
            need=need_of(trace, self._card, sizes=sizes),
            seconds=trace.seconds,
            how=how,
            edits=(Edit(trace.lines[trace.user_places[line]]),),
            estimate=True,
        )

    def _small_state(self) -> Iterator[Plan]:
        trace = self._trace
        if importlib.util.find_spec("bitsandbytes") is None or not trace.optimizers:
            return
        name, line = trace.optimizers[0]
        if name not in ("Adam", "AdamW"):
            return
        sizes = [
            size // 4 if KINDS[kind] == "optimizer state" else size
            for size, kind in zip(trace.sizes, trace.kinds, strict=True)
        ]
        need = need_of(trace, self._card, sizes=sizes)
        how = f"bitsandbytes.optim.{name}8bit in place of torch.optim.{name}"
        title, edits = "8-bit optimizer state", (Edit(line),)
        yield Plan(title=title, need=need, seconds=trace.seconds, how=how, edits=edits, estimate=True, exact=False)


def _order(plan: Plan) -> tuple[bool, bool, bool, float, int]:
    """Plans that fit come first: those that were run, then exact ones, then the fastest."""
    return (not plan.need.fits, plan.estimate, not plan.exact, plan.seconds, plan.need.total)


def fastest(trials: Trials, trace: Trace, sizes: BatchSizes, card: Card) -> tuple[Plan, ...]:
    """Plans for a step that does not fit; none for a step that does."""
    if need_of(trace, card).fits:
        return ()
    return Planner(trials, trace, sizes, card).plans()


def _with_argument(line: Line, argument: str) -> str:
    """The line with one more argument in its call, if the call begins and ends on it; otherwise nothing."""
    text = linecache.getline(line.file, line.line).rstrip("\n")
    code = text.split("  #")[0].rstrip()
    if not code.endswith(")") or code.count("(") != code.count(")") or argument.partition("=")[0] in code:
        return ""
    return f"{code[:-1].rstrip().rstrip(',')}, {argument})" + text[len(code) :]


def _with_number(line: Line, number: int, other: int) -> str:
    """The line with its one such number exchanged; otherwise nothing."""
    text = linecache.getline(line.file, line.line).rstrip("\n")
    changed, count = re.subn(rf"\b{number}\b", str(other), text)
    return changed if count == 1 else ""
