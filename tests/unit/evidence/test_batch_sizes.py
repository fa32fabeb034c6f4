"""Calls of models held against each other: which of them are alike, which grow, and which one stands out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from torchmedic.evidence.memory.batch_sizes import comparable, is_growing, largest_item, unusual
from torchmedic.evidence.memory.fake.rows import rows_in
from torchmedic.observe.step.batches import Batches, Given, main_input


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


class Pair(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor


def test_what_a_model_is_called_with_may_be_in_a_list_a_dict_or_an_object() -> None:
    small, large, flag = torch.zeros(2), torch.zeros(3, 9), object()

    assert main_input([small, large]) is small  # the first tensor, whatever comes after it
    assert main_input(["train", large]) is large
    assert main_input([[small, large]]) is large
    assert main_input([{"y": small, "x": large}]) is large
    assert main_input([Pair(small, large)]) is large
    assert main_input([SimpleNamespace(store={"x": large}, y=small, name="graph")]) is large
    assert main_input([flag, None, 3, torch.nn.Linear(9, 9)]) is None  # a module is no input


def test_the_first_dimension_of_one_image_is_not_that_of_the_batch() -> None:
    module, batches = torch.nn.Identity(), Batches()
    batches.given((torch.zeros(8, 3),), module)
    assert rows_in([], [], batches.shapes, [module]) == 8
    batches.given(([torch.zeros(3, 20, 30), torch.zeros(3, 5, 5)],), module)
    assert batches.shapes[-1].shape == (3, 20, 30)
    assert rows_in([], [], batches.shapes, [module]) is None


def test_the_item_of_a_list_that_is_far_larger_than_the_others() -> None:
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 90, 90), torch.zeros(3, 5, 4)]
    found = largest_item(images, [7, 25, 31])
    assert found is not None
    assert (found.item, found.shape, found.usual) == (25, (3, 90, 90), (3, 5, 4))
    assert largest_item(images[::2], [7, 31]) is None
    assert largest_item(images, [7, 25]) is None  # not one for each item
