"""Ranks that go on are compared: weights that drift apart, a rank that is slow, a device that two ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from torchmedic.detect.ranks.drift import find_drift
from torchmedic.detect.ranks.stragglers import find_straggler, slow_phase
from torchmedic.diagnose import registry
from torchmedic.diagnose.rule import Draft
from torchmedic.records import Moment, Phase, StackFrame
from torchmedic.records.rank_facts import JobFacts, RankFacts, WeightSample
from torchmedic.records.ranks import BACKWARD, Collective, RankLog

LINE = StackFrame(file="train.py", line=7, function="train")


def facts(rank: int, *sizes: float, **more: object) -> RankFacts:
    """A rank whose only weight has these sizes after 0, 1, 2 ... updates."""
    samples = tuple(WeightSample(updates=at, sizes=(size,)) for at, size in enumerate(sizes))
    known = RankFacts(
        rank=rank, pid=rank, world_size=2, host="a", names=("w",), shapes=((3,),), weights=samples, updating=LINE
    )
    return replace(known, **more)


def log(rank: int, times: list[float], op: str = "all_reduce", shape: tuple[int, ...] = (3,)) -> RankLog:
    calls = tuple(Collective(op=op, shapes=(shape,), frames=(LINE,), time=time) for time in times)
    return RankLog(rank=rank, pid=rank, world_size=2, calls=calls, complete=True)


def why(*ranks: RankFacts, logs: tuple[RankLog, ...] = (), ended: bool = True) -> str | None:
    found = find_drift(JobFacts(ranks=ranks, logs=logs, ended=ended))
    return found.why if found is not None else None


WRAPPED = {"wrapper": "DistributedDataParallel", "wrapped_at": LINE}
QUIET = (log(0, [1.0], "barrier"), log(1, [1.0], "barrier"))
AVERAGING = (log(0, [1.0, 2.0, 3.0]), log(1, [1.0, 2.0, 3.0]))
IN_GROUPS = tuple(replace(each, calls=tuple(replace(call, group="1") for call in each.calls)) for each in AVERAGING)


@pytest.mark.parametrize(
    ("first", "second", "logs", "expected"),
    [
        (facts(0, 1, 2, 3), facts(1, 1, 2, 3), QUIET, None),
        (facts(0, 1, 2, 3), facts(1, 1, 2, 3.5), QUIET, "no-exchange"),
        (facts(0, 1, 2, 3), facts(1, 1, 2, 3.5), (), None),  # what was called is not known
        (facts(0, 1, 2, 3), facts(1, 1.5, 2, 3.5), QUIET, None),  # each rank has a model of its own
        (facts(0, 1, 2, 3), facts(1, 1.5, 2, 3.5), AVERAGING, "start"),
        (facts(0, 1, 2, 3), facts(1, 1, 2, 3.5), AVERAGING, None),  # the ranks may differ on purpose
        (facts(0, 1, 2, 3, early=(LINE,)), facts(1, 1, 2, 3.5, early=(LINE,)), AVERAGING, "early"),
        (facts(0, 1, 2, 3, early=(LINE,)), facts(1, 1, 2, 3, early=(LINE,)), AVERAGING, None),
        (facts(0, 1, 2, 3), facts(1, 1.5, 2, 3.5), IN_GROUPS, None),  # each group has a model of its own
        (facts(0, 1, 2, 3), facts(1, 1, 2, 3.00001), QUIET, None),  # rounding
        (facts(0, 1, 2), facts(1, 1, 3), QUIET, None),  # too early to tell
        (facts(0, 1, 2, 3, **WRAPPED), facts(1, 1, 2, 4, **WRAPPED), QUIET, "unused-wrapper"),
        (facts(0, 1, 2, 3, forwards=1, **WRAPPED), facts(1, 1, 2, 4, forwards=1, **WRAPPED), (), "changed"),
        (
            facts(0, 1, 2, 3, forwards=1, is_apart=True, **WRAPPED),
            facts(1, 1, 2, 4, forwards=1, is_apart=True, **WRAPPED),
            (),
            None,
        ),
        (facts(0, 1, 2, 3), facts(1, 1, 2, 9, shapes=((4,),)), QUIET, None),  # stages of a pipeline
        (  # a layer that was added after the model was wrapped
            facts(0, 1, 2, 3, forwards=1, names=("b",), added=("b",), **WRAPPED),
            facts(1, 1, 2, 4, forwards=1, names=("b",), added=("b",), **WRAPPED),
            (),
            "added",
        ),
        (  # its gradients are averaged by hand
            facts(0, 1, 2, 3, forwards=1, names=("b",), added=("b",), **WRAPPED),
            facts(1, 1, 2, 3, forwards=1, names=("b",), added=("b",), **WRAPPED),
            (),
            None,
        ),
        (  # a layer that was unfrozen after the model was wrapped
            facts(0, 1, 2, 3, forwards=1, names=("b",), thawed="b", **WRAPPED),
            facts(1, 1, 2, 4, forwards=1, names=("b",), thawed="b", **WRAPPED),
            (),
            "thawed",
        ),
        (  # experts of each rank, beside a wrapped model
            facts(0, 1, 2, 3, forwards=1, names=("",), **WRAPPED),
            facts(1, 1, 2, 4, forwards=1, names=("",), **WRAPPED),
            (),
            None,
        ),
    ],
)
def test_why_weights_differ(
    first: RankFacts, second: RankFacts, logs: tuple[RankLog, ...], expected: str | None
) -> None:
    assert why(first, second, logs=logs) == expected


def with_samples(known: RankFacts, **more: object) -> RankFacts:
    """The rank, with something more in its last sample."""
    return replace(known, weights=(*known.weights[:-1], replace(known.weights[-1], **more)))


def test_learning_rates_that_differ() -> None:
    def at_rate(rank: int, size: float, rate: float, **more: object) -> RankFacts:
        return with_samples(facts(rank, 1, 2, size, **more), rates=(0.5, rate))

    wrapped = {"forwards": 1, **WRAPPED}
    assert why(at_rate(0, 3, 0.1, **wrapped), at_rate(1, 4, 0.05, **wrapped)) == "rates"
    assert why(at_rate(0, 3, 0.1, **wrapped), at_rate(1, 4, 0.1, **wrapped)) == "changed"
    assert why(at_rate(0, 3, 0.1), at_rate(1, 4, 0.05), logs=AVERAGING) == "rates"
    found = find_drift(JobFacts(ranks=(at_rate(0, 3, 0.1, **wrapped), at_rate(1, 4, 0.05, **wrapped))))
    assert found is not None
    assert (found.rates, found.rates_at) == (((0, 0.1), (1, 0.05)), 2)
    again = [at_rate(rank, 3 + rank, 0.1, **wrapped) for rank in (0, 1)]  # equal again when they were looked at
    first, second = (with_samples(each, past_rates=0.4 - 0.1 * each.rank) for each in again)
    assert why(first, second) == "rates"


def test_updates_that_one_rank_left_out() -> None:
    def after(rank: int, size: float, exchanges: int) -> RankFacts:
        return with_samples(facts(rank, 1, 2, size, forwards=1, **WRAPPED), exchanges=exchanges)

    assert why(after(0, 3, 3), after(1, 4, 2)) == "skipped"
    assert why(after(0, 3, 2), after(1, 4, 2)) == "changed"
    assert why(after(0, 3, 3), after(1, 3, 2)) is None  # the weights are equal


def test_the_line_that_leaves_an_update_out_and_the_line_that_leaves_the_wrapper_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for x in data:\n    loss = model.module(x)\n    if count % 4:\n        continue\n    if loss > 3:\n"
        "        continue\n    optimizer.step()\n"
    )
    update, call = (StackFrame(file=str(script), line=line, function="main") for line in (7, 2))

    def told(*ranks: RankFacts) -> tuple[str, int]:
        job = JobFacts(ranks=ranks, logs=QUIET, ended=True)
        found = registry.load("ranks.weights_drift_apart").check(job)
        assert isinstance(found, Draft)
        place = found.done().cause_location
        assert place is not None
        return place.file, place.line

    def skipping(rank: int, size: float, exchanges: int) -> RankFacts:
        known = with_samples(facts(rank, 1, 2, size, forwards=1, **WRAPPED), exchanges=exchanges)
        return replace(known, updating=update)

    assert told(skipping(0, 3, 3), skipping(1, 4, 2))[1] == 5
    unused = facts(0, 1, 2, 3, **WRAPPED), facts(1, 1, 2, 4, **WRAPPED)
    assert told(*(replace(each, calling=call) for each in unused))[1] == call.line
    assert told(*(replace(each, calling=update) for each in unused))[1] == LINE.line


@pytest.mark.parametrize(("logged", "line"), [('"loss", x', 2), ('"loss", x, sync_dist=True', 4), ('"other", x', 4)])
def test_the_value_that_a_library_gives_to_a_scheduler(tmp_path: Path, logged: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'def step(self, x):\n    self.log({logged})\nPLAN = {{"monitor": "loss"}}\ntrainer.fit(model)\n')
    fit = StackFrame(file=str(script), line=4, function="")
    ranks = [facts(rank, 1, 2, 3 + rank, forwards=1, scheduling=fit, updating=fit, **WRAPPED) for rank in (0, 1)]
    first, second = (with_samples(each, past_rates=0.4 - 0.1 * each.rank) for each in ranks)
    found = registry.load("ranks.weights_drift_apart").check(JobFacts(ranks=(first, second), ended=True))
    assert isinstance(found, Draft)
    place = found.done().cause_location
    assert place is not None
    assert place.line == line


def test_a_weight_whose_gradient_is_never_exchanged() -> None:
    def two(rank: int, second: float) -> RankFacts:
        samples = tuple(WeightSample(updates=at, sizes=(1.0, 2.0 + second * at)) for at in range(3))
        return facts(rank, names=("w", "b"), shapes=((3,), (1,)), weights=samples)

    assert why(two(0, 0.5), two(1, 0.9), logs=AVERAGING) == "left-out"
    flat = (log(0, [1.0, 2.0, 3.0], shape=(4,)), log(1, [1.0, 2.0, 3.0], shape=(4,)))
    assert why(two(0, 0.5), two(1, 0.9), logs=flat) is None  # what was in there is not known


def test_gradients_that_only_one_rank_gets() -> None:
    reduced = tuple(log(rank, [1.0, 2.0, 3.0], "reduce") for rank in range(2))
    assert why(facts(0, 1, 2, 3), facts(1, 1, 2, 4), logs=reduced) == "one-rank"
    # The weights of that rank go to the others.
    served = tuple(replace(each, calls=each.calls + log(0, [1.0, 2.0], "broadcast").calls) for each in reduced)
    assert why(facts(0, 1, 2, 3), facts(1, 1, 2, 4), logs=served) is None
    # A metric of this shape now and then.
    assert why(facts(0, 1, 2, 3), facts(1, 1, 2, 4), logs=(log(0, [1.0], "reduce"), log(1, [1.0], "reduce"))) is None


@pytest.mark.parametrize(
    ("second", "is_told"),
    [(("a", "c", "b"), True), (("a", "b", "c"), False), (("a", "b", "d"), False), (("a", "b"), False)],
)
def test_parameters_in_different_orders(second: tuple[str, ...], is_told: bool) -> None:
    rule = registry.load("ranks.parameters_in_different_order")
    job = JobFacts(ranks=(facts(0, parameters=("a", "b", "c"), **WRAPPED), facts(1, parameters=second, **WRAPPED)))
    found = rule.check(job)
    assert (found is not None) is is_told
    if found is not None:
        assert found.message == "parameter 2 is `b` on rank 0 and `c` on rank 1"


def test_gradients_that_are_exchanged_in_one_flat_tensor() -> None:
    calls = tuple(Collective(op="all_reduce", shapes=((5,),), dtypes=("float32",), frames=(LINE,)) for _ in range(3))
    logs = tuple(RankLog(rank=rank, pid=rank, world_size=2, calls=calls, complete=True) for rank in range(2))
    assert why(facts(0, 1, 2, 3, nbytes=20), facts(1, 1.5, 2, 3.5, nbytes=20), logs=logs) == "start"
    assert why(facts(0, 1, 2, 3, nbytes=24), facts(1, 1.5, 2, 3.5, nbytes=24), logs=logs) is None  # something else


def test_weights_that_are_averaged_now_and_then_are_left_alone() -> None:
    rare = (log(0, [1.0]), log(1, [1.0]))
    assert why(facts(0, 1, 2, 3), facts(1, 1, 2, 3.5), logs=rare) is None
    # The first exchange may still come.
    assert why(facts(0, 1, 2, 3), facts(1, 1, 2, 3.5), logs=QUIET, ended=False) is None


def meetings(late: float, count: int = 30) -> list[float]:
    return [step + late for step in range(count)]


def test_the_rank_that_comes_last_is_slow() -> None:
    found = find_straggler([log(0, meetings(0.0)), log(1, meetings(0.6)), log(2, meetings(0.01))], ended=True)
    assert found is not None
    assert (found.rank, found.late, round(found.wait, 1), round(found.step, 1)) == (1, 29, 0.6, 1.0)


def moments(data: float, backward: float) -> tuple[Moment, ...]:
    """Ten steps that spend so many seconds in two of their phases."""
    lasts: list[tuple[Phase, float]] = [("data", data), ("forward", 0.1), ("backward", backward), ("other", 0.0)]
    found, time = [], 0.0
    for step in range(10):
        for line, (phase, seconds) in enumerate(lasts):
            found.append(Moment(time=time, step=step, micro_step=0, updates=step, phase=phase, file="train.py",
                                line=line, rss=0, device_memory=0))  # fmt: skip
            time += seconds
    return tuple(found)


def test_the_phase_in_which_a_slow_rank_loses_its_time() -> None:
    slow = find_straggler([log(0, meetings(0.0)), log(1, meetings(0.6))], ended=True)
    assert slow is not None
    found = slow_phase({0: moments(0.0, 0.7), 1: moments(0.6, 0.1)}, slow)
    assert found is not None
    assert (found[0].phase, found[0].line, round(found[1], 1)) == ("data", 0, 0.6)
    assert slow_phase({0: moments(0.3, 0.4), 1: moments(0.6, 0.1)}, slow) is None  # half of the wait
    assert slow_phase({1: moments(0.6, 0.1)}, slow) is None


def test_a_slow_rank_is_seen_while_the_run_goes_on_after_more_meetings() -> None:
    """The rings are read at different moments, and backwards stand for what torch calls in them."""

    def live(count: int) -> list[RankLog]:
        times = [meetings(0.0, count + 1), meetings(0.6, count)]
        marks = [[Collective(op=BACKWARD, frames=(LINE,), time=at) for at in each] for each in times]
        return [RankLog(rank=rank, pid=1, calls=tuple(each)) for rank, each in enumerate(marks)]

    assert find_straggler(live(30), ended=False) is None
    found = find_straggler(live(100), ended=False)
    assert found is not None
    assert (found.rank, round(found.wait, 1)) == (1, 0.6)


@pytest.mark.parametrize(
    "times",
    [
        [meetings(0.0), meetings(0.2)],  # a fifth of the step
        [meetings(0.0, 15), meetings(0.6, 15)],  # too few
        [meetings(0.0), [at + (0.6 if at % 2 else -0.6) for at in meetings(0.0)]],  # they take turns
        [meetings(0.0), meetings(3.5)],  # nobody waits in this call: the others are three steps ahead
    ],
    ids=["short", "few", "turns", "ahead"],
)
def test_ranks_that_are_not_slow(times: list[list[float]]) -> None:
    assert find_straggler([log(rank, each) for rank, each in enumerate(times)], ended=True) is None


def test_a_device_is_shared_only_where_another_is_free() -> None:
    def told(*devices: str, count: int, hosts: str = "aa") -> bool:
        ranks = [facts(rank, device=each, devices=count, host=hosts[rank]) for rank, each in enumerate(devices)]
        return registry.load("ranks.device_shared_by_ranks").check(JobFacts(ranks=tuple(ranks))) is not None

    assert told("gpu-0", "gpu-0", count=2)
    assert not told("gpu-0", "gpu-1", count=2)
    assert not told("gpu-0", "gpu-0", count=1)  # there is only one
    assert not told("gpu-0", "gpu-0", count=2, hosts="ab")


def test_the_same_constants_on_all_ranks_say_nothing() -> None:
    def told(*batches: tuple[str, ...]) -> bool:
        ranks = [facts(rank, batches=each, forwards=1, **WRAPPED) for rank, each in enumerate(batches)]
        return registry.load("ranks.same_data_on_all_ranks").check(JobFacts(ranks=tuple(ranks))) is not None

    assert told(tuple("abcd"), tuple("abcd"))
    assert not told(tuple("abcd"), tuple("efgh"))
    assert not told(tuple("aaaa"), tuple("aaaa"))
    assert not told(tuple("abc"), tuple("abc"))


@pytest.mark.parametrize(
    ("sampler", "advice"),
    [
        ("_InfiniteConstantSampler", "IterableDataset of each rank"),
        ("RandomSampler", "DistributedSampler"),
        ("", "seed"),
    ],
)
def test_the_advice_fits_what_drew_the_same_data(sampler: str, advice: str) -> None:
    ranks = tuple(facts(rank, batches=tuple("abcd"), sampler=sampler, forwards=1, **WRAPPED) for rank in range(2))
    draft = registry.load("ranks.same_data_on_all_ranks").check(JobFacts(ranks=ranks))
    assert isinstance(draft, Draft)
    assert advice in draft.done().treatments[0].title


@pytest.mark.parametrize(
    ("taken", "expected"),
    [("enumerate(self.batches)", 1), ("make()", 3)],
    ids=["by its name", "not known by name"],
)
def test_the_same_data_is_told_where_the_loader_is_made(tmp_path: Path, taken: str, expected: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"self.batches = DataLoader(a)\nvalid = DataLoader(b)\nfor batch in {taken}:\n    train(batch)\n")
    known = {"batches": tuple("abcd"), "forwards": 1, "sampler": "RandomSampler", **WRAPPED}
    line = StackFrame(file=str(script), line=3, function="fit")
    draft = registry.load("ranks.same_data_on_all_ranks").check(
        JobFacts(ranks=tuple(facts(rank, loading=line, **known) for rank in range(2)))
    )
    assert isinstance(draft, Draft)
    assert next((each.role, each.line) for each in draft.done().locations) == ("cause", expected)
