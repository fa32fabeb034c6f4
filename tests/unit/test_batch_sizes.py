"""Calls of models held against each other: which of them are alike, which grow, and which one stands out."""

from __future__ import annotations

import torch

from torchmedic.observe.batches import Given
from torchmedic.replay.memory.sizes import comparable, is_growing, unusual


def calls(*rows: int, grad: bool = True, module: int = 1) -> list[Given]:
    return [Given(torch.Size([count, 4]), True, grad, module) for count in rows]


def test_only_calls_of_the_same_model_in_the_same_mode_are_held_against_each_other() -> None:
    noted = [*calls(8, 9), *calls(500, grad=False), *calls(70, module=2), *calls(10)]
    (now,) = calls(30)

    assert [each.shape[0] for each in comparable(noted, now, grad=True)] == [8, 9, 10, 30]
    assert [each.shape[0] for each in comparable(noted, noted[-1], grad=True)] == [8, 9, 10]  # noted already
    assert [each.shape[0] for each in comparable(noted, None, grad=False)] == [500]
    assert [each.shape[0] for each in comparable(noted[:-1], None, grad=True)] == [70]
    assert comparable([], None, grad=True) == []


def test_growth_is_several_rises_of_which_the_last_is_no_surprise() -> None:
    assert is_growing(calls(8, 8, 16, 16, 32, 32, 64))
    assert is_growing(calls(500, 2500, 4500, 6500, 8500))
    assert not is_growing(calls(8, 8, 8, 8, 16))  # once
    assert not is_growing(calls(8, 9, 10, 9, 12, 14))  # not always
    assert not is_growing(calls(8, 9, 10, 11, 9000))  # the last is something else
    assert not is_growing(calls(8, 16, 32))  # too few to tell


def test_what_is_larger_than_all_before_it() -> None:
    found = unusual(calls(8, 9, 10, 11, 9000))

    assert found is not None
    assert (found.usual, found.factor, found.dimension) == ((11, 4), 9000 / 11, 0)
    assert unusual(calls(8, 9, 10, 9000)) is None  # too few to tell what is usual
