"""A model that each rank trains by itself is told from one that is exchanged in some way, or is meant to differ."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from torchmedic.detect.ranks.left_out_models import model_left_out
from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import JobFacts, RankFacts, TrainedModel, WeightSample
from torchmedic.records.ranks import Collective, RankLog

UPDATES = 40  # of both models together, in turn
LINE = StackFrame(file="train.py", line=42, function="step")
ACTOR = TrainedModel(
    updating=LINE, shapes=((16, 5), (3, 16)), nbytes=512, is_wrapped=False, start=(1.0, 2.0), last=(1.5, 2.5), turns=8
)
CRITIC = TrainedModel(
    updating=LINE, shapes=((20, 5), (1, 20)), nbytes=480, is_wrapped=False, start=(3.0, 4.0), last=(3.5, 4.5), turns=8
)


def send(*shape: int, op: str = "all_reduce", dtype: str = "float32") -> Collective:
    return Collective(op=op, shapes=(shape,), dtypes=(dtype,))


AVERAGED = [send(16, 5), send(3, 16)] * (UPDATES // 2)
GIVEN = [send(*shape, op="broadcast") for shape in (*ACTOR.shapes, *CRITIC.shapes)]


def job(calls: list[Collective], *models: TrainedModel, drift: float = 0.1, **changes: Any) -> JobFacts:
    """Two ranks; the last model differs on rank 1."""
    apart = (*models[:-1], replace(models[-1], last=tuple(each + drift for each in models[-1].last)))
    samples = (WeightSample(updates=UPDATES, sizes=(1.0,)),)
    facts = [
        RankFacts(rank=rank, pid=rank, world_size=2, weights=samples, models=own, **changes)
        for rank, own in enumerate((models, apart))
    ]
    logs = [RankLog(rank=rank, pid=rank, calls=tuple(calls)) for rank in range(2)]
    return JobFacts(ranks=tuple(facts), logs=tuple(logs), ended=True)


WRAPPED = replace(ACTOR, is_wrapped=True)


@pytest.mark.parametrize(
    "found",
    [
        job(GIVEN + AVERAGED, ACTOR, CRITIC),
        job([], WRAPPED, CRITIC, wrapper="DistributedDataParallel", forwards=1),
        job([send(2)] * UPDATES, WRAPPED, CRITIC, forwards=1),  # metrics
    ],
)
def test_a_model_that_was_forgotten(found: JobFacts) -> None:
    told = model_left_out(found)
    assert told is not None
    assert (told.shape, told.line, told.sizes) == ((20, 5), LINE, ((0, 3.5), (1, 3.6)))


@pytest.mark.parametrize(
    "healthy",
    [
        job(AVERAGED, ACTOR, CRITIC, drift=0.0),
        job(AVERAGED, CRITIC),  # one model
        job([], ACTOR, CRITIC),  # no model is exchanged
        job(AVERAGED + [send(20, 5), send(1, 20)] * 20, ACTOR, CRITIC),
        job(AVERAGED + [send(120)] * 20, ACTOR, CRITIC),  # in one flat tensor
        job(AVERAGED + [send(120, dtype="float16")] * 20, ACTOR, CRITIC),  # compressed
        job(AVERAGED + [send(60), send(60)] * 20, ACTOR, CRITIC),  # in two parts
        job(AVERAGED + [send(20, 5, op="broadcast")] * 20, ACTOR, CRITIC),  # one rank sends its weights
        job([send(8, 4, op="all_to_all")] * UPDATES, WRAPPED, CRITIC, forwards=1),  # experts
        job([], WRAPPED, CRITIC, forwards=1, is_apart=True),
        job([], WRAPPED, replace(CRITIC, turns=1), forwards=1),
    ],
)
def test_a_model_that_is_exchanged_or_meant_to_differ(healthy: JobFacts) -> None:
    assert model_left_out(healthy) is None


def test_models_that_began_with_different_weights() -> None:
    found = job(AVERAGED, ACTOR, CRITIC)
    other = replace(found.ranks[1], models=(ACTOR, replace(found.ranks[1].models[1], start=(9.0, 9.0))))
    assert model_left_out(replace(found, ranks=(found.ranks[0], other))) is None
    assert model_left_out(replace(found, ended=False)) is None
