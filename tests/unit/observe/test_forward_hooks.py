"""The dict that stands for torch's dict of global module hooks."""

from __future__ import annotations

from collections import OrderedDict
from types import FrameType
from typing import Any

from torchmedic.observe.hooks.forward import _AskedHooks


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
