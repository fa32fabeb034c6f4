"""Weights that should be the same on all ranks and are not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from torchmedic.detect.ranks.left_out_models import exchanging_line, model_left_out
from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import JobFacts, RankFacts, WeightSample
from torchmedic.records.ranks import Collective, RankLog
from torchmedic.source.branches import nodes_around
from torchmedic.source.line_relations import reads_attribute
from torchmedic.source.syntax import calls_in, syntax_tree

_MIN_DIFFERENCE = 1e-4  # of the size of a weight; rounding on unlike hardware is smaller
_MIN_UPDATES = 2
_MIN_UPDATES_APART = 512  # without any exchange, in a run that goes on: weights may be averaged now and then

_SHARING = ("Distributed", "Shard")  # in the name of a sampler
_GENERATOR = ((5056,),)  # bytes of the state of torch's generator on the CPU

Why = Literal[
    "unused-wrapper",
    "no-sync",
    "idle",
    "added",
    "thawed",
    "written",
    "start",
    "changed",
    "rewritten",
    "skipped",
    "rates",
    "no-exchange",
    "left-out",
    "left-out-model",
    "one-rank",
    "early",
]


class Drift(NamedTuple):
    """One weight after a number of updates, with its size on every rank.

    `rates` are the learning rates of every rank where they first differed, after `rates_at` updates. `exchanges` is how
    often every rank had exchanged gradients for the same number of updates. `is_call`: the line calls the model.
    """

    name: str
    shape: tuple[int, ...]
    updates: int
    sizes: tuple[tuple[int, float], ...]
    why: Why
    line: StackFrame | None
    rates: tuple[tuple[int, float], ...] = ()
    rates_at: int = 0
    exchanges: tuple[tuple[int, int], ...] = ()
    is_call: bool = False


def find_drift(job: JobFacts) -> Drift | None:
    """The first weight that differs, if the ranks are to train one model together; else one of a model left out."""
    return _of_first_model(job) or _of_model_left_out(job)


def _of_model_left_out(job: JobFacts) -> Drift | None:
    found = model_left_out(job)
    if found is None:
        return None
    return Drift("", found.shape, job.ranks[0].weights[-1].updates, found.sizes, "left-out-model", found.line)


def _of_first_model(job: JobFacts) -> Drift | None:
    facts = job.ranks
    first = facts[0]
    idle = _idle(job)
    if idle is not None:
        return idle
    if len({each.shapes for each in facts}) > 1 or not first.shapes:
        return None  # different models: the stages of a pipeline, for example
    common = sorted(set.intersection(*({sample.updates for sample in each.weights} for each in facts)))
    if not common or common[-1] < _MIN_UPDATES:
        return None
    last, start = common[-1], _differing(facts, 0) if 0 in common else None
    index = _differing(facts, last)
    if index is None:
        return None
    starts_equal = 0 in common and start is None
    rates_at, rates = next(((at, rates) for at in common if (rates := _unlike_rates(facts, at))), (0, ()))
    before = [at for at in common if len({_sample(each, at).past_rates for each in facts}) > 1]
    if not rates and before:  # they were equal again when they were looked at
        rates_at = before[0]
    why = _why(job, index, last, starts_equal=starts_equal, same_rates=not rates and not before)
    if why is None:
        return None
    sizes = tuple((each.rank, _sizes(each, last)[index]) for each in facts)
    called = _unwrapped(first) if why == "unused-wrapper" else None
    line = called or (
        first.wrapped_at if why in ("unused-wrapper", "added", "thawed", "written", "rewritten") else first.updating
    )
    if why == "no-sync":
        line = _context(first.unsynced, "no_sync") or first.unsynced[0]
    if why == "one-rank":
        line = next(frame for call in _calls(job.logs[0], "reduce") for frame in call.frames)
    if why == "left-out":
        line = exchanging_line(job.logs[0], first.shapes) or line
    if why == "early":
        line = next((each for each in first.early if _is_beside(each, first.updating)), first.early[0])
    exchanges = tuple((each.rank, _sample(each, last).exchanges) for each in facts)
    name, shape, is_call = first.names[index], first.shapes[index], called is not None
    return Drift(name, shape, last, sizes, why, line, rates, rates_at, exchanges, is_call)


def _idle(job: JobFacts) -> Drift | None:
    """Ranks that never update the weights of their wrapped model, while others do. `exchanges` are their updates."""
    made = {each.rank: each.weights[-1].updates if each.weights else 0 for each in job.ranks}
    busy = [each for each in job.ranks if made[each.rank]]
    if (
        not job.ended
        or not busy
        or len(busy) == len(made)
        or not all(each.wrapper and each.forwards for each in job.ranks)
    ):
        return None
    first = busy[0]
    is_given = any(
        call.op in ("broadcast", "all_reduce") and not call.native and set(call.shapes) & set(first.shapes)
        for log in job.logs
        for call in log.calls
    )
    if is_given or max(made.values()) < _MIN_UPDATES or any(each.is_apart for each in job.ranks):
        return None
    name, shape = first.names[0], first.shapes[0]
    return Drift(name, shape, max(made.values()), (), "idle", first.updating, exchanges=tuple(made.items()))


def _why(job: JobFacts, index: int, updates: int, *, starts_equal: bool, same_rates: bool) -> Why | None:
    """Why the weights differ; None where the ranks may train different models on purpose."""
    facts = job.ranks
    if all(each.wrapper for each in facts):
        if any(each.is_apart for each in facts):
            return None
        if all(each.unsynced for each in facts):
            return "no-sync" if starts_equal and _never_meet(job, updates) else None
        if not any(each.forwards for each in facts):
            return "unused-wrapper" if starts_equal else None
        if not all(each.forwards for each in facts):
            return None
        if all(facts[0].names[index] in each.added for each in facts):
            return "added"
        if all(facts[0].names[index] == each.thawed for each in facts):
            return "thawed"
        if all(facts[0].names[index] == each.written for each in facts):
            return "written"
        if len({_sample(each, updates).exchanges for each in facts}) > 1:
            return "skipped"
        if not starts_equal and all(each.weights[0].updates == 0 for each in facts if each.weights):
            return "rewritten"
        return "changed" if same_rates or not starts_equal else "rates"
    if any(each.wrapper for each in facts) or len(job.logs) < len(facts):
        return None
    if all(_averages(log, each) for log, each in zip(job.logs, facts, strict=True)):
        if starts_equal:
            return "rates" if not same_rates else "early" if all(each.early for each in facts) else None
        return "start"
    if starts_equal and not any(_exchanges(log, each) for log, each in zip(job.logs, facts, strict=False)):
        return "no-exchange" if job.ended or updates >= _MIN_UPDATES_APART else None
    shape = facts[0].shapes[index]
    averaged = [_averaged(log, each) for log, each in zip(job.logs, facts, strict=True)]
    if starts_equal and all(averaged) and not any(shape in _sent(log) for log in job.logs):
        return "left-out"
    if starts_equal and all(_only_reduces(log, shape, updates) for log in job.logs):
        return "one-rank"
    return None


def _never_meet(job: JobFacts, updates: int) -> bool:
    """Whether no rank averages weights or gradients by hand, as it may do now and then."""
    if not job.ended and updates < _MIN_UPDATES_APART and not all(each.forwards for each in job.ranks):
        return False  # the first averaging may come
    return not any(
        call.op == "all_reduce"
        and not call.native
        and (set(call.shapes) & set(each.shapes) or call.nbytes == each.nbytes)
        for log, each in zip(job.logs, job.ranks, strict=False)
        for call in log.calls
    )


def _unwrapped(facts: RankFacts) -> StackFrame | None:
    """The line that calls the model inside of its wrapper, by the attribute `module`."""
    line = facts.calling
    return line if line is not None and reads_attribute(line.file, line.line, "module") else None


def _context(frames: tuple[StackFrame, ...], name: str) -> StackFrame | None:
    """The nearest `with` around these lines whose context comes from a call of a name; else the only such call."""
    for frame in frames:
        for node in reversed(nodes_around(frame.file, frame.line)):
            if isinstance(node, ast.With) and any(True for item in node.items for _ in calls_in(item, name)):
                return msgspec.structs.replace(frame, line=node.lineno)
    files = dict.fromkeys(frame.file for frame in frames)
    calls = [(file, call.lineno) for file in files for call in calls_in(syntax_tree(file), name)]
    return StackFrame(file=calls[0][0], line=calls[0][1], function="") if len(calls) == 1 else None


def _only_reduces(log: RankLog, shape: tuple[int, ...], updates: int) -> bool:
    """Whether the gradient of a weight goes to one rank for every update, and no weight comes back."""
    calls = list(_calls(log, "reduce"))
    sent_back = _sent(log, "broadcast").count(shape)
    return len(calls) >= updates and _sent(log, "reduce").count(shape) >= updates > sent_back and bool(calls[0].frames)


def _averages(log: RankLog, facts: RankFacts) -> bool:
    """Whether a rank exchanges its gradients by hand, for every update. Weights are averaged less often."""
    return _averaged(log, facts) == set(facts.shapes)


def _averaged(log: RankLog, facts: RankFacts) -> set[tuple[int, ...]]:
    """The shapes of the weights that a rank exchanges for every update, one by one or all in one flat tensor."""
    if log.dropped:
        return set()
    updates = max((sample.updates for sample in facts.weights), default=0)
    updates -= bool(facts.early)  # before the first backward there are no gradients to exchange
    sent = _sent(log)
    flat = sum(0 < call.nbytes == facts.nbytes for call in _calls(log))
    return {shape for shape in facts.shapes if max(flat, sent.count(shape)) >= updates}


def _calls(log: RankLog, op: str = "all_reduce") -> Iterator[Collective]:
    """The exchanges of a rank with all others: the models of two groups may differ on purpose."""
    return (call for call in log.calls if call.op == op and call.group == "0")


def _sent(log: RankLog, op: str = "all_reduce") -> list[tuple[int, ...]]:
    return [shape for call in _calls(log, op) for shape in call.shapes]


def _exchanges(log: RankLog, facts: RankFacts) -> bool:
    """Whether a rank has sent anything to others that may hold gradients or weights.

    Where a sampler shares the data out, the ranks train one model: what is smaller than the model in all, such as a
    metric, does not count, nor does the state of a random generator, which a library sends before each epoch.
    """
    sent = [call for call in log.calls if call.op not in ("barrier", "monitored_barrier", "new_group")]
    if log.dropped or not any(word in facts.sampler for word in _SHARING):
        return log.dropped > 0 or bool(sent)
    others = [call for call in sent if call.shapes != _GENERATOR or call.dtypes != ("uint8",)]
    return not all(call.nbytes for call in others) or sum(call.nbytes for call in others) >= facts.nbytes


def _is_beside(line: StackFrame, other: StackFrame | None) -> bool:
    return other is not None and (line.file, line.function) == (other.file, other.function)


def _differing(facts: tuple[RankFacts, ...], updates: int) -> int | None:
    """The number of the first weight whose size differs between ranks; of wrapped models where there are any.

    Beside a wrapped model, each rank may have layers of its own, such as its experts.
    """
    rows = [_sizes(each, updates) for each in facts]
    is_wrapped = all(each.wrapper for each in facts)
    for index, values in enumerate(zip(*rows, strict=False)):
        low, high = min(values), max(values)
        if is_wrapped and not facts[0].names[index]:
            continue
        if high - low > _MIN_DIFFERENCE * max(abs(high), 1e-12):
            return index
    return None


def _unlike_rates(facts: tuple[RankFacts, ...], updates: int) -> tuple[tuple[int, float], ...]:
    """One learning rate of every rank, if it differs between ranks."""
    rows = [_sample(each, updates).rates for each in facts]
    unlike = next((rates for rates in zip(*rows, strict=False) if len(set(rates)) > 1), ())
    return tuple((each.rank, rate) for each, rate in zip(facts, unlike, strict=False))


def _sizes(facts: RankFacts, updates: int) -> tuple[float, ...]:
    return _sample(facts, updates).sizes


def _sample(facts: RankFacts, updates: int) -> WeightSample:
    none = WeightSample(updates=updates, sizes=())
    return next((sample for sample in facts.weights if sample.updates == updates), none)
