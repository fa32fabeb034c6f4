"""A bad value is followed back to the operation, or the tensor, that it came from."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchmedic.replay.trace.bad_value_origins import Birth, births
from torchmedic.replay.trace.microscope import Microscope


def origins(compute: Callable[[], torch.Tensor], *, gradients: tuple[torch.Tensor, ...] = ()) -> list[Birth]:
    """The births behind the result of a computation, or behind the gradients that its backward leaves."""
    scope = Microscope(watch=gradients)
    with scope:
        result = compute()
        if gradients:
            result.backward()
    targets = [value for _, value in scope.gradients] if gradients else [scope.value_of(result)]
    scope.read()
    return births(scope, targets)


def names(found: list[Birth]) -> list[str]:
    return [birth.op.kind if birth.op is not None else "leaf" for birth in found]


def test_nan_is_born_in_the_division() -> None:
    (birth,) = origins(lambda: (torch.zeros(3) / torch.zeros(3)).exp().sum() * 2)

    assert names([birth]) == ["div"]
    assert birth.kind == "nan"
    assert birth.spoiled is None
    assert len(birth.path) == 3  # exp, sum, mul


def test_an_infinity_that_becomes_nan_later_is_the_root() -> None:
    def softmax_by_hand() -> torch.Tensor:
        e = torch.exp(torch.tensor([1000.0, 1.0]))
        return (e / e.sum()).sum()

    (birth,) = origins(softmax_by_hand)

    assert names([birth]) == ["exp"]
    assert birth.kind == "inf"
    assert birth.spoiled is not None
    assert birth.spoiled.kind == "div"


def test_an_infinity_that_was_written_down_is_no_root() -> None:
    def masked() -> torch.Tensor:
        scores = torch.randn(2, 3).masked_fill(torch.ones(2, 3, dtype=torch.bool), -math.inf)
        return scores.softmax(-1).sum()

    assert names(origins(masked)) == ["softmax"]


def test_a_mask_made_before_is_no_root_either() -> None:
    mask = torch.full((2, 3), -math.inf)

    assert names(origins(lambda: (torch.randn(2, 3) + mask).softmax(-1).sum())) == ["softmax"]


def test_what_is_discarded_leaves_no_trace() -> None:
    def discarded() -> torch.Tensor:
        ratio = torch.zeros(3) / torch.zeros(3)
        return torch.where(ratio.isnan(), torch.ones(3), ratio).sum()

    assert origins(discarded) == []


def test_bad_data_is_a_leaf_with_its_first_reader() -> None:
    data = torch.tensor([1.0, math.nan])

    def doubled() -> torch.Tensor:
        return (data * 2).sum()

    (birth,) = origins(doubled)

    assert birth.leaf is not None
    assert birth.leaf.tensor is data


def test_a_write_into_a_part_is_told_from_the_writes_beside_it() -> None:
    def columns() -> torch.Tensor:
        out = torch.zeros(4, 3)
        out[:, 0] = torch.ones(4).sqrt()
        out[:, 1] = torch.zeros(4).log()
        out[:, 2] = torch.ones(4).exp()
        return out.sum()

    assert names(origins(columns)) == ["log"]


def test_a_healthy_part_of_a_bad_tensor_is_healthy() -> None:
    def halves() -> torch.Tensor:
        both = torch.cat([torch.zeros(3).log(), torch.ones(3)])
        bad, good = both.chunk(2)
        assert bad.isinf().all()
        return (good / torch.zeros(3)).sum()

    assert names(origins(halves)) == ["div"]


def test_memory_that_is_used_again_is_not_mistaken() -> None:
    def reused() -> torch.Tensor:
        for _ in range(50):
            del_me = torch.zeros(64).log()
            assert del_me.isinf().all()
            del del_me
        kept = torch.ones(64)
        return (kept / torch.zeros(64)).sum()

    assert names(origins(reused)) == ["div"]


def test_a_gradient_leads_to_the_backward_operation_and_its_line() -> None:
    weight = torch.zeros(3, requires_grad=True)
    (birth,) = origins(lambda: weight.sqrt().sum(), gradients=(weight,))

    assert birth.op is not None
    assert birth.op.derived
    assert birth.op.node.startswith("SqrtBackward")


def test_memory_that_was_never_written_to_is_named() -> None:
    def unwritten() -> torch.Tensor:
        given = torch.empty(4)
        # Whatever was there: make it bad without an operation that is seen.
        given.untyped_storage().copy_(torch.full((4,), math.nan).untyped_storage())
        return given.sum()

    assert names(origins(unwritten)) == ["empty"]
