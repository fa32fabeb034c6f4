"""Every operation is seen, with the line that it belongs to and, in a second pass, with its values."""

from __future__ import annotations

import inspect
import time
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchmedic.replay.isolation.sandbox import ReplayTooLong
from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.replay.trace.operations import Geometry, overlap


def here() -> int:
    frame = inspect.currentframe()
    assert isinstance(frame, FrameType)
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def only(scope: Microscope, kind: str, *, backward: bool = False) -> Op:
    found = [op for op in scope.ops if op.kind == kind and op.is_backward == backward]
    assert len(found) == 1, [op.name for op in scope.ops]
    return found[0]


def test_a_forward_operation_has_its_line_and_columns() -> None:
    x = torch.rand(3)
    with Microscope() as scope:
        line = here() + 1
        (torch.log(x) + 1).sum()

    op = only(scope, "log")
    assert op.spot is not None
    assert (op.spot.line, op.spot.function) == (line, "test_a_forward_operation_has_its_line_and_columns")
    assert op.spot.location("cause").code[op.spot.column - 8 : op.spot.end_column - 8] == "torch.log(x)"  # type: ignore[operator]


def test_a_backward_operation_has_the_line_of_its_forward_operation() -> None:
    x = torch.rand(3, requires_grad=True)
    with Microscope() as scope:
        line = here() + 1
        y = torch.sqrt(x)
        y.sum().backward()

    derived = [op for op in scope.ops if op.node.startswith("SqrtBackward")]
    assert derived
    for op in derived:
        spot = scope.spot_of(op)
        assert spot is not None
        assert spot.line == line
        assert scope.forward_of(op).kind == "sqrt"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_keeps_its_lines(reentrant: bool) -> None:
    lines = []

    def block(x: torch.Tensor) -> torch.Tensor:
        lines.append(here() + 1)
        return torch.sqrt(x * 2)

    x = torch.rand(3, requires_grad=True)
    with Microscope() as scope:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]

    derived = [op for op in scope.ops if op.node.startswith("SqrtBackward") and op.derived]
    assert derived
    assert {spot.line for op in derived if (spot := scope.spot_of(op)) is not None} == set(lines)


def test_a_line_inside_a_custom_backward_is_its_own() -> None:
    lines = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            lines.append(here() + 1)
            return gradient / 0.5

    x = torch.rand(3, requires_grad=True)
    with Microscope() as scope:
        Double.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    op = only(scope, "div", backward=True)
    assert not op.derived
    assert op.spot is not None
    assert [op.spot.line] == lines


def test_the_gradient_of_a_gradient_leads_to_the_forward_line() -> None:
    x = torch.rand(3, requires_grad=True)
    with Microscope() as scope:
        line = here() + 1
        y = (x**3).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.sum().backward()

    last = [op for op in scope.ops if op.derived and "Pow" in op.node][-1]
    spot = scope.spot_of(last)
    assert spot is not None
    assert spot.line == line


def test_values_are_captured_by_number() -> None:
    x = torch.tensor([4.0, 9.0])

    def run(scope: Microscope) -> None:
        with scope:
            x.sqrt().mul_(2).sum()

    first = Microscope()
    run(first)
    number = only(first, "mul").index
    again = Microscope(capture=frozenset({number}))
    run(again)

    captured = again.ops[number].captured
    assert captured is not None
    assert captured.tensors[0].tolist() == [2.0, 3.0]  # as it was before it was written to
    assert captured.outputs[0].tolist() == [4.0, 6.0]
    assert captured.argument(1) == 2
    assert first.ops[number].captured is None


def test_readers_and_sources_are_each_others_opposite() -> None:
    with Microscope() as scope:
        a = torch.ones(3).exp()
        b = a.view(3, 1).log()
        (b + a.unsqueeze(1)).sum()

    exp = only(scope, "exp")
    assert [op.kind for op in scope.readers_of(exp) if op.kind in ("log", "add")] == ["log", "add"]
    assert all(
        scope.source(value) == exp.index
        for value in only(scope, "log").inputs
        if value.storage == exp.outputs[0].storage
    )


def test_magnitudes_are_read_once_at_the_end() -> None:
    with Microscope() as scope:
        y = torch.tensor([1.0, -7.0]) * 2
    value = scope.value_of(y)
    scope.read()

    assert scope.magnitude(value) == 14.0


def test_a_replay_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(ReplayTooLong), Microscope(deadline=time.monotonic() - 1):
        torch.ones(3) + 1


def test_sparse_and_whole_tensors_pass_through() -> None:
    weight = torch.nn.Embedding(5, 2, sparse=True)
    with Microscope(watch=list(weight.parameters())) as scope:
        weight(torch.tensor([1, 1])).sum().backward()
        torch.arange(3) + 1
    scope.read()

    assert [tensor.shape for tensor, _ in scope.gradients] == [(5, 2)]


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, (64, 64), (64, 1)), (100, (8,), (1,)), True),
        ((0, (4, 2), (4, 1)), (2, (4, 2), (4, 1)), False),  # two halves of every row
        ((0, (4, 2), (4, 1)), (1, (4, 2), (4, 1)), True),
        ((0, (8,), (1,)), (8, (8,), (1,)), False),
    ],
)
def test_views_that_share_an_element(one: Geometry, other: Geometry, share: bool) -> None:
    assert overlap(one, other) is share
    assert overlap(other, one) is share
