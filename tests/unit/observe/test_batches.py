"""Which items the batch in hand is made of: in order, ahead, abandoned, through subsets."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, dataloader

from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.items import through_subsets
from torchmedic.observe.step.kept_batch import KeptBatch
from torchmedic.observe.step.tensors import tensors_in


class Watched:
    """A loader whose iterator tells a `Batches` what the hooks would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = Batches()
        draw = dataloader._BaseDataLoaderIter._next_index

        def _next_index(iterator: Any) -> Any:
            index = draw(iterator)
            self.batches.index_drawn(iterator, index)
            return index

        monkeypatch.setattr(dataloader._BaseDataLoaderIter, "_next_index", _next_index)

    def next(self, iterator: Any) -> Any:
        self.batches.requested(iterator)
        try:
            batch = next(iterator)
        finally:
            self.batches.taken(iterator)
        self.batches.arrived(batch)
        return batch


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def numbers(size: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(size))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_indices_are_those_of_the_batch(watched: Watched, workers: int) -> None:
    iterator = iter(DataLoader(numbers(), batch_size=4, shuffle=True, num_workers=workers))
    for _ in range(6):
        (batch,) = watched.next(iterator)
        assert watched.batches.indices == batch.tolist()


def test_persistent_workers_that_were_left_early_start_anew(watched: Watched) -> None:
    loader = DataLoader(numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        for _ in range(2):  # and leave four batches behind
            (batch,) = watched.next(iterator)
            assert watched.batches.indices == batch.tolist()


def test_two_loaders_do_not_mix(watched: Watched) -> None:
    first = iter(DataLoader(numbers(), batch_size=2, shuffle=True, num_workers=1))
    second = iter(DataLoader(numbers(), batch_size=3, shuffle=True))
    for iterator in (first, second, first, first, second):
        (batch,) = watched.next(iterator)
        assert watched.batches.indices == batch.tolist()


def test_the_items_of_a_subset_are_those_of_the_whole(watched: Watched) -> None:
    iterator = iter(DataLoader(Subset(numbers(), [20, 3, 11, 7]), batch_size=2))
    watched.next(iterator)
    (batch,) = watched.next(iterator)
    assert watched.batches.indices == batch.tolist() == [11, 7]


def test_an_index_that_a_subset_does_not_have_stays_as_it_is() -> None:
    assert through_subsets(Subset(numbers(), [5]), 3) == 3
    assert through_subsets(None, [1, 2]) == [1, 2]


def test_what_is_under_way_is_known_by_its_number(watched: Watched) -> None:
    iterator = iter(DataLoader(numbers(), batch_size=4, num_workers=2))
    watched.next(iterator)
    watched.next(iterator)

    known = watched.batches.under_way(iterator)
    assert known[1] == [4, 5, 6, 7]
    assert known[3] == [12, 13, 14, 15]
    assert 0 not in known


def test_a_finished_iterator_is_let_go(watched: Watched) -> None:
    iterator = iter(DataLoader(numbers(), batch_size=4))
    watched.next(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None
    assert watched.batches.iterators() == []


def test_a_big_batch_is_not_kept_alive() -> None:
    batches = Batches()
    batch = torch.empty(20_000_000)
    gone = weakref.ref(batch)
    batches.arrived(batch)
    assert [tensor.shape for tensor in batches.tensors()] == [batch.shape]
    del batch
    assert gone() is None
    assert batches.tensors() == []


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_flat_batch_of_a_short_step_is_given_back_as_it_was(kind: type) -> None:
    tensors = [torch.arange(4), torch.ones(2)]
    batch = kind(tensors)
    flat, nested = KeptBatch(batch, batch, [weakref.ref(each) for each in batch]), KeptBatch(batch, list(batch))
    assert (flat.nbytes, flat.on_host) == (nested.nbytes, nested.on_host) == (40, True)
    assert type(flat.whole) is kind
    assert all(one is other for one, other in zip(flat.whole, tensors, strict=True))
    del batch
    tensors.clear()
    assert [each.tolist() for each in flat.whole] == [[0, 1, 2, 3], [1.0, 1.0]]


def test_tensors_are_found_in_a_nested_batch() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert tensors_in({"a": [one, (two, "text")], "b": {"c": three}}) == [one, two, three]
