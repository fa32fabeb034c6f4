"""What is kept of an exception in a DataLoader: read from live frames, sent as bytes, never in the way."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from torchmedic.observe.failures import sketch, worker_failures
from torchmedic.records import WorkerFailure


class Numbers(Dataset[Any]):
    """Fails on one item, after its variable was given another value."""

    def __init__(self, bad: int = 7, size: int = 12) -> None:
        self.bad = bad
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"bad {index}")
        return torch.ones(2), index


def failure(loader: DataLoader[Any]) -> WorkerFailure:
    """What `describe` sees of the exception that a loader without workers ends with."""
    try:
        for _ in loader:
            pass
    except Exception as error:
        return worker_failures.describe(error, None)
    raise AssertionError("nothing was raised")


def test_the_item_is_the_one_that_was_read() -> None:
    found = failure(DataLoader(Numbers(), batch_size=4))

    assert (found.stage, found.index, found.batch_indices) == ("sample", 7, (4, 5, 6, 7))
    assert (found.exception, found.message) == ("ValueError", "bad 7")
    assert found.frames[0].function == "__getitem__"
    assert "index = 7" in found.sample


@pytest.mark.parametrize(
    ("dataset", "index"),
    [
        (Subset(Numbers(), [1, 7, 3, 5]), 7),
        (Subset(Subset(Numbers(), [9, 7, 3, 5]), [2, 1]), 7),
        (ConcatDataset([Numbers(bad=-1), Numbers(bad=7)]), 19),
    ],
    ids=["subset", "subset-of-subset", "concat"],
)
def test_the_item_is_named_through_the_wrappers_of_torch(dataset: Dataset[Any], index: int) -> None:
    assert failure(DataLoader(dataset, batch_size=2)).index == index


def test_without_batches_the_sampler_gives_the_item_itself() -> None:
    found = failure(DataLoader(Numbers(), batch_size=None))

    assert (found.index, found.batch_indices) == (7, ())


def test_a_variable_that_was_overwritten_names_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overwrites(Numbers):
        def __getitem__(self, index: int) -> Any:
            index = 1000 + index
            return torch.ones(2)[index]

    # As on Python 3.12, where the comprehension of torch's fetcher leaves no frame.
    monkeypatch.setattr(
        worker_failures,
        "is_fetch",
        lambda name: name.endswith("fetch.py") and sys._getframe(1).f_code.co_name != "_failing_index",
    )
    assert failure(DataLoader(Overwrites(), batch_size=2)).index is None


def test_an_iterable_dataset_has_no_indices() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield torch.ones(2)
            yield torch.ones(2)
            raise OSError("shard is cut short")

    found = failure(DataLoader(Stream(), batch_size=4))
    assert (found.stage, found.index, found.batch_indices) == ("sample", None, ())


def test_the_samples_of_a_batch_that_cannot_be_made_are_described() -> None:
    found = failure(DataLoader([(torch.ones(3), 1), (torch.ones(2), 2.0)], batch_size=2))  # type: ignore[arg-type]

    assert found.stage == "collate"
    assert found.sample_shapes == ("([3], int)", "([2], float)")


def test_an_exception_that_cannot_say_anything_is_described_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    try:
        raise Silent
    except Silent as error:
        found = worker_failures.describe(error, 3)
    assert (found.worker, found.stage, found.exception) == (3, "other", "Silent")
    assert "__str__ raised" in found.message


def test_a_runaway_recursion_is_cut_in_the_middle() -> None:
    def dive() -> None:
        dive()

    try:
        dive()
    except RecursionError as error:
        found = worker_failures.describe(error, None)
    assert len(found.frames) <= 120


def wrapper_of(error: Exception) -> ExceptionWrapper:
    try:
        raise error
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
        worker_failures._note(wrapper, lambda *_: None, lambda: None)
        return wrapper


def test_the_failure_travels_as_bytes_and_comes_back_on_the_exception() -> None:
    wrapper = pickle.loads(pickle.dumps(wrapper_of(KeyError("label"))))

    with pytest.raises(KeyError) as caught:
        wrapper.reraise()
    worker_failures._hand_over(wrapper, caught.value)
    found = worker_failures.failure_of(caught.value)
    assert found is not None
    assert (found.exception, found.message) == ("KeyError", "'label'")


def test_the_wrapper_can_be_unpickled_where_torchmedic_is_not_installed() -> None:
    data = pickle.dumps(wrapper_of(ValueError("bad")))
    script = (
        "import pickle, sys; sys.modules['torchmedic'] = None; sys.modules['msgspec'] = None\n"
        f"print(type(pickle.loads({data!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ExceptionWrapper"


def test_an_exception_that_forbids_attributes_is_handed_over() -> None:
    class Closed(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("closed")

    error = Closed()
    worker_failures._hand_over(wrapper_of(ValueError("bad")), error)
    assert worker_failures.failure_of(error) is not None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (torch.tensor(3), 3),
        (torch.tensor([4]), 4),
        ("key", "key"),
        ("\ud800", "?"),
        (1 << 70, str(1 << 70)),
        ((1, 2), [1, 2]),
        (torch.ones(3), "tensor([1., 1., 1.])"),
        (None, None),
    ],
)
def test_an_index_can_be_written_down(value: Any, expected: Any) -> None:
    assert sketch.plain(value) == expected
    msgspec.json.encode(sketch.plain(value))


def test_a_hostile_object_is_only_named() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no")

        @property
        def shape(self) -> Any:
            raise RuntimeError("no")

        dtype = None

    assert sketch.plain(Hostile()) == "<Hostile>"
    assert sketch.shape_of(Hostile()) == "Hostile"
    assert sketch.shape_of({"a": [Hostile(), torch.ones(2, 1)]}) == "{a: (Hostile, [2, 1])}"


def test_a_healthy_loader_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_failures, "describe", lambda *_: pytest.fail("described a healthy batch"))
    for _ in DataLoader(TensorDataset(torch.ones(8)), batch_size=2):
        pass
