"""How far a device had come when it died, and which call on the way is not torch's own."""

from __future__ import annotations

import re

import msgspec

from torchmedic.observe.device.device_marks import Mark
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, place
from torchmedic.source.user_code import is_user_file

# What the device was at between two marks, in words: the phases of a step by the mark that ends them.
_UNDER_WAY = {"backward": "the forward pass or the loss", "update": "the backward pass"}


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing that a device is known to have finished, and what it was to do next."""

    words: str
    places: tuple[Location, ...]
    blamed: bool  # one line is to blame, and stands first


def trail_of(finished: Mark | None, unfinished: Mark | None, foreign: Frame | None) -> Trail | None:
    """What the marks of the device and the shadow of the step say together; None where neither says anything."""
    if finished is None and unfinished is None and foreign is None:
        return None
    places: list[Location] = []
    if foreign is not None:
        places.append(foreign.location("cause", "not an operation of torch's: no CPU can run it"))
    if unfinished is not None and unfinished.line:
        places.append(_place(unfinished, foreign is None, _label(unfinished)))
    if finished is not None and finished.line:
        places.append(_place(finished, False, "the device had come this far"))
    return Trail(words=_words(finished, unfinished, foreign), places=tuple(places), blamed=foreign is not None)


def _words(finished: Mark | None, unfinished: Mark | None, foreign: Frame | None) -> str:
    parts = []
    if unfinished is not None:
        what = _UNDER_WAY.get(unfinished.what, f"`{unfinished.what}`")
        parts.append(f"the device was at {what} of step {unfinished.step} when it died")
    elif finished is not None:
        parts.append(f"the device died after all that was marked up to step {finished.step}")
    if foreign is not None:
        parts.append("on the way there is one call that is not torch's own" if parts else "one call is not torch's own")
    return "; ".join(parts)


def _label(mark: Mark) -> str:
    return "it did not finish this" if mark.what not in _UNDER_WAY else "the device did not come to this line"


def _place(mark: Mark, is_cause: bool, label: str) -> Location:
    return place("cause" if is_cause else "origin", mark.file, mark.line, label)


def foreign_call(error: BaseException) -> Frame | None:
    """The user's line at which a shadow stopped because something that is not torch's wants the device itself."""
    found: Frame | None = None
    tb = error.__traceback__
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found = Frame(tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        tb = tb.tb_next
    return found if _WANTS_DEVICE.search(str(error)) else None


_WANTS_DEVICE = re.compile(r"cuda|gpu|\bcpu\b|device|pointer|triton|kernel", re.I)
