"""Live objects of the user: read completely, and without running any of the user's code."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch

from torchmedic.replay.isolation.undo import Contents
from torchmedic.source.objects.containers import first_values, items, length
from torchmedic.source.objects.finite import is_bad, is_finite
from torchmedic.source.objects.graph import following, leaves_behind, nodes_behind, oldest, walk
from torchmedic.source.objects.parts import attributes, parts


class Touchy:
    """Every way to ask it for something runs its own code, and fails the test."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self) -> None:
        object.__setattr__(self, "slot", [1])
        object.__getattribute__(self, "__dict__")["plain"] = [2]

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def computed(self) -> Any:
        raise AssertionError("computed")


class TouchyList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("iterated")

    def __len__(self) -> int:
        raise AssertionError("measured")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("indexed")


class TouchyDict(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("iterated")

    def values(self) -> Any:
        raise AssertionError("iterated")

    def __iter__(self) -> Any:
        raise AssertionError("iterated")

    def __len__(self) -> int:
        raise AssertionError("measured")


def test_attributes_are_read_from_dict_and_slots_without_code_of_the_class() -> None:
    assert attributes(Touchy(), Touchy) == [("plain", [2]), ("slot", [1])]
    names = [part.name for part in parts(Touchy(), Touchy)]
    assert names[:2] == ["plain", "slot"]


@pytest.mark.parametrize("value", [TouchyList([1, 2, 3]), TouchyDict({0: 1, 1: 2, 2: 3})])
def test_containers_are_read_past_the_methods_of_their_class(value: Any) -> None:
    assert length(value) == 3
    assert items(value) == [(0, 1), (1, 2), (2, 3)]
    assert first_values(value, 2) == [1, 2]


def test_a_container_gets_back_its_items_past_the_methods_of_its_class() -> None:
    value = TouchyList([1, 2])
    put_back = Contents(value)
    list.append(value, 3)

    put_back()

    assert items(value) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("kind", [list, tuple, deque, set, frozenset, dict, OrderedDict])
def test_every_container_of_python_can_be_read(kind: Any) -> None:
    value = kind({"a": "b"}) if issubclass(kind, dict) else kind(["b"])
    assert [item for _, item in items(value)] == ["b"]


def test_the_parts_of_a_function_are_its_closure_defaults_and_attributes() -> None:
    kept = [1]

    def function(a: Any, b: Any = kept, *, c: Any = kept) -> Any:
        return kept

    function.extra = kept  # type: ignore[attr-defined]

    found = [(part.name, part.code is not None) for part in parts(function, type(function)) if part.item is kept]

    assert found == [("kept", True), ("b", True), ("c", True), ("extra", False)]


def test_what_only_a_library_knows_is_a_part_if_it_is_asked_for() -> None:
    tensor = torch.zeros(1)
    iterator = iter([tensor])  # a type of C
    partial = functools.partial(print, tensor)

    assert not list(parts(iterator, type(iterator)))
    assert [type(part.item) for part in parts(iterator, type(iterator), libraries=True)] == [list]
    assert any(part.item is tensor for part in parts(partial, type(partial)))


def test_the_graph_is_walked_once_in_both_orders_and_up_to_a_limit() -> None:
    weight = torch.ones(2, requires_grad=True)
    shared = weight * 2
    loss = (shared + shared.exp()).sum()

    depth, breadth = list(walk([loss.grad_fn])), list(walk([loss.grad_fn, None], nearest_first=True))

    assert len(depth) == len(set(depth)) == len(breadth) == 5
    assert set(depth) == set(breadth)
    assert breadth[1] in following(loss.grad_fn)
    assert len(list(walk([loss.grad_fn], most=2))) == 2
    assert leaves_behind([loss]) == [weight]
    assert len(nodes_behind([loss])) == 4


def test_the_oldest_node_of_a_graph_is_found_with_the_number_of_old_ones() -> None:
    first = torch.ones(2, requires_grad=True) * 2
    number = first.grad_fn._sequence_nr()  # type: ignore[union-attr]
    last = (first * 3).sum()

    assert oldest(last.grad_fn, number + 1, set()) == (number, 1)
    seen: set[Any] = set()
    assert oldest(last.grad_fn, number, seen) == (number, 0)
    assert len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_a_tensor_is_finite_if_all_its_elements_are(dtype: torch.dtype) -> None:
    assert is_finite(torch.ones(4).to(dtype))
    assert not is_finite(torch.tensor([1.0, float("nan")]).to(dtype))
    assert not is_finite(torch.tensor([float("inf")]).to(dtype))


def test_a_sum_that_overflows_is_no_bad_value() -> None:
    assert is_finite(torch.full((4,), torch.finfo(torch.float32).max))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.int64), torch.ones(0), torch.empty(3, device="meta")],
    ids=["integers", "empty", "meta"],
)
def test_what_holds_no_numbers_to_read_is_finite(tensor: torch.Tensor) -> None:
    assert is_finite(tensor)


def test_a_sparse_tensor_is_as_finite_as_its_values() -> None:
    indices = torch.tensor([[0, 1]])
    assert is_finite(torch.sparse_coo_tensor(indices, torch.ones(2), (3,), check_invariants=True))
    assert not is_finite(
        torch.sparse_coo_tensor(indices, torch.tensor([1.0, float("inf")]), (3,), check_invariants=True)
    )


def test_a_bad_number_is_found_in_containers() -> None:
    assert is_bad({"x": [1.0, torch.tensor([float("nan")])]})
    assert is_bad(float("inf"))
    assert not is_bad([1, "nan", None, torch.ones(2), {"y": 2.0}])


class _Column:
    """A column of a table, as pandas has it."""

    __module__ = "pandas.core.series"
    ndim = 1

    def __init__(self, *values: Any) -> None:
        self.values = numpy.array(values, dtype=None if len({type(value) for value in values}) == 1 else object)
        self.dtype = self.values.dtype

    def to_numpy(self) -> Any:
        return self.values


class _Table:
    __module__ = "pandas.core.frame"
    ndim = 2

    def __init__(self, **columns: _Column) -> None:
        self._columns = columns

    def items(self) -> Any:
        return self._columns.items()


def test_a_bad_number_is_found_in_tables() -> None:
    names = _Column("a", float("nan"))  # a text that is missing
    assert is_bad(_Column(1.0, float("nan")))
    assert is_bad(_Column(1, "text", float("nan")))
    assert is_bad(_Table(x=_Column(1.0, float("inf")), name=names))
    assert not is_bad(_Table(x=_Column(1.0, 2.0), name=names))
