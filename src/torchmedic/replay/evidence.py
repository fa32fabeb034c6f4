"""Everything that the rules may look at when an exception ended the training."""

from __future__ import annotations

import functools

from torchmedic.detect.exceptions import Raised
from torchmedic.observe.frames import is_user_file
from torchmedic.records import Location, Role
from torchmedic.replay.calls import Call, raising_call
from torchmedic.replay.frames import Frame, frames_of


class RaisedEvidence:
    """An exception, its live frames, and the operation that raised it."""

    def __init__(self, incident: Raised) -> None:
        self.incident = incident
        self.error = incident.error
        self.message = str(incident.error)
        self.frames: list[Frame] = frames_of(incident.error.__traceback__)

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """Names of the exception's class and its bases."""
        return frozenset(kind.__name__ for kind in type(self.error).__mro__)

    @property
    def kind(self) -> str:
        return type(self.error).__name__

    def says(self, *fragments: str) -> bool:
        """Whether the message holds all of these stable fragments, in any case."""
        text = self.message.lower()
        return all(fragment.lower() in text for fragment in fragments)

    @functools.cached_property
    def call(self) -> Call | None:
        """The operation that raised, from the innermost frame."""
        return raising_call(self.frames[-1]) if self.frames else None

    @functools.cached_property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code; that of the script where all of it is library code."""
        for frame in reversed(self.frames):
            if frame.is_user:
                return frame
        return self.frames[0] if self.frames else None

    @property
    def library_frames(self) -> list[Frame]:
        """The frames below the user's innermost one, outermost first."""
        for position in range(len(self.frames) - 1, -1, -1):
            if is_user_file(self.frames[position].file):
                return self.frames[position + 1 :]
        return self.frames

    def at_user_line(self, role: Role, label: str = "") -> tuple[Location, ...]:
        """The expression of the user's innermost frame; nothing where no frame is left."""
        return (self.user_frame.location(role, label),) if self.user_frame is not None else ()
