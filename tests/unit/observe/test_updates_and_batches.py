"""Batches and weights as the ledger looks at them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.observe.loop.batch_looks import look_at, targets_of
from torchmedic.observe.loop.overwrites import Overwrites
from torchmedic.source.spots import Place

LABELS = torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.parametrize(
    ("batch", "is_equal"),
    [
        ((torch.ones(5, 3), LABELS), True),
        ({"image": torch.zeros(5, 2, 2), "mask": torch.ones(5, 4), "label": LABELS}, True),
        ((torch.arange(15.0).reshape(5, 3), LABELS), False),
        ({"ids": torch.arange(15).reshape(5, 3), "mask": torch.ones(5, 3), "labels": LABELS}, False),
        ((torch.ones(5, 3), torch.arange(15.0).reshape(5, 3)), False),
        ((torch.ones(5, 3),), False),
        ((torch.ones(2, 3), LABELS[:2]), False),
        (([1, 2], "text"), False),
    ],
)
def test_equal_rows_are_seen_beside_labels(batch: Any, is_equal: bool) -> None:
    assert bool(look_at(batch).equal) is is_equal


def test_a_batch_of_labels_is_told_from_one_of_inputs() -> None:
    assert look_at(LABELS).holds == "labels"
    assert look_at([torch.ones(5, 3)]).holds == "inputs"
    assert look_at(torch.ones(5)).holds == ""


def test_labels_that_the_model_is_given_are_no_targets_of_other_inputs() -> None:
    table, layer = nn.Embedding(2, 3), nn.Linear(5, 2)
    plain = nn.functional.cross_entropy(layer(torch.randn(5, 5)), LABELS)
    embedded = nn.functional.cross_entropy(table(LABELS), LABELS)
    one_hot = torch.cat([torch.randn(5, 3), nn.functional.one_hot(LABELS).float()], 1)
    indicated = nn.functional.cross_entropy(layer(one_hot), LABELS)
    assert look_at(LABELS).labels == targets_of([plain])
    assert not targets_of([embedded])
    assert not targets_of([indicated])


def _trained(after: Any, *, is_used: bool = False) -> Overwrites:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    start = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    found = Overwrites()
    for step in range(20):
        layer(torch.randn(4, 16)).square().mean().backward()
        if not found.is_over:
            found.step_begins(optimizer)
        optimizer.step()
        if not found.is_over:
            found.step_ended()
        optimizer.zero_grad()
        found.event(Place("train.py", step + 1), is_forward=is_used)
        with torch.no_grad():
            after(layer.weight, start)
        found.event(Place("train.py", step + 1))
    return found


def test_a_weight_that_is_all_but_set_back_is_found() -> None:
    found = _trained(lambda weight, start: weight.lerp_(start, 0.999)).found
    assert found is not None
    assert 0 < found.kept < 0.01
    assert not found.is_new


def test_a_weight_that_is_drawn_anew_is_found() -> None:
    found = _trained(lambda weight, _: weight.data.normal_()).found
    assert found is not None
    assert found.is_new


def test_a_weight_that_is_used_before_it_is_drawn_anew_is_left_alone() -> None:
    assert _trained(lambda weight, _: weight.data.normal_(), is_used=True).found is None


@pytest.mark.parametrize(
    "write",
    [
        lambda weight, _: None,
        lambda weight, start: weight.copy_(start),  # exactly: it is meant
        lambda weight, _: weight.clamp_(-0.2, 0.2),
        lambda weight, _: weight.div_(weight.norm()),
        lambda weight, start: weight[:7].copy_(start[:7]),
    ],
)
def test_other_writes_are_left_alone(write: Any) -> None:
    assert _trained(write).found is None
