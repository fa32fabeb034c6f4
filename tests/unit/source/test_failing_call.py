"""Which operation raised, and with which arguments."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.source.live_frames import Frame, frames_of
from torchmedic.source.lookup.failing_call import UNKNOWN, Call, raising_call, read


def last_frame(case: Callable[[], Any]) -> Frame:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it raises
        case()
    return [frame for frame in frames_of(raised.value.__traceback__) if frame.is_user][-1]


def call_of(case: Callable[[], Any]) -> Call:
    found = raising_call(last_frame(case))
    assert found is not None
    return found


def shapes(call: Call) -> list[list[int]]:
    return [list(argument.value.shape) for argument in call.tensors]


a, b = torch.zeros(2, 3), torch.zeros(4, 5)


def test_an_operator_has_two_operands() -> None:
    call = call_of(lambda: a @ b)

    assert call.op == "matmul"
    assert [argument.text for argument in call.arguments] == ["a", "b"]
    assert shapes(call) == [[2, 3], [4, 5]]


def test_a_method_has_its_object_as_first_argument() -> None:
    call = call_of(lambda: a.add(b, alpha=2))

    assert (call.op, call.bound) == ("add", True)
    assert call.get(0, "input") is a
    assert call.get(1, "other") is b
    assert call.get(9, "alpha") == 2


def test_a_method_on_a_line_of_its_own() -> None:
    def case() -> Any:
        return (
            a
            .relu()
            .add(1)
            .matmul(
                b
            )
            .sum()
        )  # fmt: skip

    frame = last_frame(case)
    call = raising_call(frame)

    assert call is not None
    assert call.op == "matmul"
    assert shapes(call) == [[2, 3], [4, 5]]
    assert frame.location("cause").code.startswith(".matmul(")


def test_an_augmented_assignment() -> None:
    def case() -> None:
        x = torch.zeros(2)
        x += b

    call = call_of(case)
    assert call.op == "add_"
    assert shapes(call) == [[2], [4, 5]]


def test_an_assignment_to_an_index_knows_its_value() -> None:
    def case() -> None:
        x = torch.zeros(5)
        x[:2] = b

    call = call_of(case)
    assert call.op == "index_put_"
    assert shapes(call) == [[5], [4, 5]]


def test_lists_are_taken_apart_with_their_expressions() -> None:
    call = call_of(lambda: torch.cat([a, b], dim=0))

    assert [argument.text for argument in call.tensors] == ["a", "b"]
    assert call.get(1, "dim") == 0


def test_one_unreadable_member_does_not_hide_the_others() -> None:
    def make() -> torch.Tensor:
        return b

    call = call_of(lambda: torch.cat([a, make()]))

    assert call.arguments[0].value is UNKNOWN
    assert shapes(call) == [[2, 3]]
    assert not call.is_known


def test_starred_arguments_are_read() -> None:
    pair = (a, b)

    call = call_of(lambda: torch.mm(*pair))

    assert shapes(call) == [[2, 3], [4, 5]]


def test_in_a_comprehension_no_other_variable_is_taken_for_the_loop_variable() -> None:
    def case() -> list[torch.Tensor]:
        x = torch.zeros(9, 9)
        assert x is not None
        return [x @ b for x in [a]]

    call = call_of(case)
    # Python 3.12 runs it in the function's own frame, and has put the outer `x` back.
    assert shapes(call) == ([[2, 3], [4, 5]] if sys.version_info < (3, 12) else [[4, 5]])


def test_a_parameter_without_a_shape_is_no_tensor_to_compare() -> None:
    lazy = nn.LazyLinear(3)

    call = call_of(lambda: lazy.weight.add(1))

    assert call.tensors == []


class Counting(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return x


def value_of(case: Callable[[], Any]) -> Any:
    """The value of the first operand of the raising expression."""
    return call_of(case).arguments[0].value


def test_pure_operations_are_computed_again() -> None:
    assert value_of(lambda: a.t().reshape(-1)[:4] @ b[0]).shape == (4,)
    assert value_of(lambda: torch.cat([a, a], dim=1) @ b).shape == (2, 6)
    assert value_of(lambda: nn.functional.relu(a) @ b).shape == (2, 3)


def test_the_users_code_is_never_run_again() -> None:
    module = Counting()
    before = Counting.calls

    assert value_of(lambda: module(a) @ b) is UNKNOWN
    assert Counting.calls == before + 1


def test_nothing_random_is_computed_again() -> None:
    assert value_of(lambda: torch.rand(2, 3) @ b) is UNKNOWN
    assert value_of(lambda: nn.functional.dropout(a) @ b) is UNKNOWN


def test_nothing_is_changed_by_looking() -> None:
    x = torch.zeros(2, 3)
    norm = nn.BatchNorm1d(3)

    def add_one() -> torch.Tensor:
        return x.add_(1) @ b

    assert value_of(add_one) is UNKNOWN
    assert x.eq(1).all()

    assert value_of(lambda: norm(a) @ b).shape == (2, 3)
    assert norm.num_batches_tracked == 1


def test_layers_of_torch_are_run_again_without_hooks() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True))
    assert value_of(lambda: net(a) @ b).shape == (2, 6)

    net[0].register_forward_hook(lambda *_: None)
    assert value_of(lambda: net(a) @ b) is UNKNOWN


def test_a_property_is_not_evaluated() -> None:
    class Holder:
        @property
        def x(self) -> torch.Tensor:
            return torch.zeros(2, 3)

    holder = Holder()
    assert value_of(lambda: holder.x @ b) is UNKNOWN


def test_private_attributes_are_found_under_their_mangled_name() -> None:
    class Net:
        def __init__(self) -> None:
            self.__x = a

        def run(self) -> torch.Tensor:
            return self.__x @ b

    assert value_of(Net().run) is a


def test_reading_never_raises() -> None:
    frame = last_frame(lambda: a @ b)
    for text in ("nothing", "a.nothing", "a[99]", "a @ b", "a.view(7)", "torch.nothing(a)", "(lambda: 1)()"):
        assert read(ast.parse(text, mode="eval").body, frame) is UNKNOWN
