"""The dict that stands for torch's dict of global module hooks."""

from __future__ import annotations

from collections import OrderedDict
from types import FrameType
from typing import Any, cast

from torch._guards import TracingContext, tracing
from torch.nn.modules import module as nn_module

from torchmedic.observe.hooks import patches
from torchmedic.observe.hooks.current_step import Step
from torchmedic.observe.hooks.forward import ForwardHooks, _AskedHooks


def test_only_the_question_is_noticed_and_all_else_is_passed_on() -> None:
    hooks: OrderedDict[int, Any] = OrderedDict({1: "a"})
    frames: list[FrameType] = []
    asked = _AskedHooks(hooks, frames.append)

    asked[2] = "b"
    assert hooks == {1: "a", 2: "b"}
    assert asked.pop(1) == "a"
    assert (list(asked.keys()), asked.get(2), 2 in asked, list(asked.items())) == ([2], "b", True, [(2, "b")])
    del asked[2]
    asked.update({3: "c"})
    asked.clear()
    assert not hooks
    assert not frames

    assert not asked
    assert [frame.f_code.co_name for frame in frames] == ["test_only_the_question_is_noticed_and_all_else_is_passed_on"]


def test_code_that_is_compiled_meets_the_dict_of_torch() -> None:
    plain = nn_module._global_forward_pre_hooks
    hooks = ForwardHooks(cast(Step, None))
    try:
        with tracing(TracingContext(None)):  # the compiler runs a backward pass of its own, which ends
            hooks.expect()
            assert nn_module._global_forward_pre_hooks is plain
        hooks.expect()
        assert nn_module._global_forward_pre_hooks is not plain
    finally:
        hooks.remove()
    assert nn_module._global_forward_pre_hooks is plain


def test_the_stance_of_torch_is_asked_through_us_only_while_a_call_is_expected() -> None:
    from torch._dynamo import eval_frame  # takes a second, in each worker

    patches.take_back()  # what an earlier test has left
    of_torch = eval_frame._callback_from_stance
    hooks = ForwardHooks(cast(Step, None))
    try:
        for _ in range(2):
            hooks.expect()
            assert eval_frame._callback_from_stance is not of_torch
            hooks.rest()
            assert eval_frame._callback_from_stance is of_torch
        hooks.expect()
    finally:
        hooks.remove()
        patches.take_back()
    assert eval_frame._callback_from_stance is of_torch
