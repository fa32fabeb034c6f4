"""The updates that follow a backward call: which optimizer, from which frame, with which settings."""

from __future__ import annotations

import weakref
from types import CodeType, FrameType
from typing import Any

from torchmedic.observe.numbers.kept_steps import KeptBackward, UpdateEnd

_MAX_FRAMES = 60


def note_end(call: KeptBackward, optimizer: Any, frame: FrameType) -> None:
    """Note the frame that calls the update, of those that the backward call was made from."""
    if any(end.code is None or end.optimizer() is optimizer for end in call.ends):
        return
    at: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if at is None:
            return
        code = at.f_code
        for point in call.points:
            if point.code is code:
                call.ends += (update_end(optimizer, code, at.f_lasti),)
                return
        at = at.f_back


def update_end(optimizer: Any, code: CodeType | None = None, lasti: int = -1) -> UpdateEnd:
    """An update with the settings that an optimizer has now."""
    rates = tuple([group.get("lr") for group in optimizer.param_groups])
    names = ("momentum", "betas")
    momenta = tuple([{name: group[name] for name in names if name in group} for group in optimizer.param_groups])
    return UpdateEnd(weakref.ref(optimizer), rates, code, lasti, momenta)
