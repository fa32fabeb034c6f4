"""Evidence replays a step when it is told to, not when it is made, and puts back what a replay needed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchmedic.detect.failures.nonfinite import NonFinite
from torchmedic.evidence import spoiled_weights
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.spoiled_weights import trace_back
from torchmedic.observe.numbers.weight_copies import Original


class Runner:
    """A runner that counts its replays, or fails at them."""

    def __init__(self, weight: torch.Tensor, error: BaseException | None = None) -> None:
        self.modules: list[torch.nn.Module] = []
        self.parameters, self.loose_leaves = [weight], []
        self.takes_over, self.seed, self.replays, self._error = False, None, 0, error

    def play(self, scope: Any) -> Any:
        self.replays += 1
        if self._error is not None:
            raise self._error
        return SimpleNamespace(
            error=None, roots=[], taken={}, drew_random=set(), namespace={}, stood_in=False, answered=False
        )


def evidence_of(runner: Runner, **agent: Any) -> NumbersEvidence:
    weight = runner.parameters[0]
    incident = NonFinite(
        quantity="loss",
        stage="backward",
        step=3,
        rank=0,
        optimizers=(),
        stepping=None,
        bad=(),
        damaged=(weight,),
        losses=(1.0,),
    )
    step: Any = SimpleNamespace(runner=runner, last_part=None)
    return NumbersEvidence(incident, SimpleNamespace(**agent), [], None, step)


def test_a_step_is_replayed_by_replay_and_by_nothing_else() -> None:
    runner = Runner(torch.ones(2))
    evidence = evidence_of(runner, finite=SimpleNamespace(is_scaled=False))
    assert (evidence.births, evidence.op, evidence.spot, evidence.played) == ([], None, None, None)
    assert evidence.replay_with_values(evidence.op) is None
    assert runner.replays == 0
    evidence.replay()
    assert runner.replays == 1
    assert evidence.why_not == "the replayed step was finite"


def test_weights_are_put_back_if_a_replay_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, before = torch.full((2,), math.nan), torch.ones(2)
    runner = Runner(weight, KeyboardInterrupt())
    watch = SimpleNamespace(losses=SimpleNamespace(is_scaled=False, bad_call=object()), born_bad=set())
    rewind = SimpleNamespace(originals=lambda: [Original(weight, before, 2)])
    evidence = evidence_of(runner, finite=watch, rewind=rewind, kept_backwards=SimpleNamespace(calls=[]))
    held, agent = weight.data_ptr(), evidence.agent
    monkeypatch.setattr(spoiled_weights, "suspects", lambda calls, bad: [])
    with pytest.raises(KeyboardInterrupt):
        trace_back(evidence, None)
    assert runner.replays == 1
    assert weight.data_ptr() == held
    assert bool(weight.isnan().all())
    assert evidence.agent is agent
    assert evidence.weights is None


def test_a_search_that_finds_nothing_gives_back_the_evidence_itself() -> None:
    weight = torch.full((2,), math.nan)
    watch = SimpleNamespace(losses=SimpleNamespace(is_scaled=False, bad_call=object()), born_bad=set())
    rewind = SimpleNamespace(originals=list)
    evidence = evidence_of(Runner(weight), finite=watch, rewind=rewind, kept_backwards=SimpleNamespace(calls=[]))
    assert trace_back(evidence, None) is evidence
    assert evidence.is_unexplained
    assert evidence.played is None, "the replays with other weights are not those of this evidence"
    assert bool(weight.isnan().all())
