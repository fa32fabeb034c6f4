"""The progress of a training process, from its black box, and how long it may be silent, learned from the run."""

from __future__ import annotations

from pathlib import Path

from torchmedic.records import Phase
from torchmedic.runfolder.black_box import Beat, Follower

MIN_STALL_SECONDS = 30.0
FIRST_STEP_SECONDS = 60.0  # before the first update, which includes loading, compiling and tuning
_SILENT_STEPS = 5  # usual steps that a process may be silent for
_SILENCE_FACTOR = 2  # times the longest silence of the same phase so far
_MAX_BEATS = 12  # read per look; if there are more, no silence between them was long
_WORK: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class Progress:
    """The progress of one training process."""

    def __init__(self, path: Path, now: float) -> None:
        self._box = Follower(path)
        self.pid = self._box.pid
        self.last: Beat | None = None
        self._moved: float = max(self._box.started, now - 1.0)
        self._longest: dict[Phase, float] = {}
        self._step_ended: float | None = None
        self.usual_step: float | None = None
        self.last_silence = 0.0  # seconds, the longest that ended since the look before

    @property
    def ended(self) -> bool:
        return self._box.clean_exit

    @property
    def trains(self) -> bool:
        return self.last is not None and self.last.updates > 0

    def look(self) -> bool:
        """Read new beats, and return whether the process has made progress since the last look."""
        moved = False
        for beat in self._box.new(_MAX_BEATS):
            if self._is_progress(beat):
                silence = beat.time - self._moved
                self.last_silence = max(self.last_silence, silence) if moved else silence
                self._moved = max(self._moved, beat.time)
                moved = True
            self._learn(beat)
            self.last = beat
        return moved

    def _is_progress(self, beat: Beat) -> bool:
        """Whether a beat shows progress. Asking for data again is no progress by itself: an empty loader does that."""
        last = self.last
        if last is None or beat.phase in _WORK or last.phase in _WORK:
            return True
        return (beat.step, beat.micro_step, beat.updates) != (last.step, last.micro_step, last.updates)

    def _learn(self, beat: Beat) -> None:
        last = self.last
        if last is None:
            return
        took = beat.time - last.time
        if last.updates:  # times before the first update say nothing about later steps
            self._longest[last.phase] = max(self._longest.get(last.phase, 0.0), took)
        if beat.updates > last.updates:
            if self._step_ended is not None:
                each = (beat.time - self._step_ended) / (beat.updates - last.updates)
                usual = self.usual_step
                self.usual_step = each if usual is None else usual + 0.1 * (min(each, 4 * usual) - usual)
            self._step_ended = beat.time

    def still(self, now: float) -> float:
        """Seconds without progress."""
        return max(0.0, now - self._moved)

    @property
    def phase(self) -> Phase:
        return self.last.phase if self.last is not None else "other"

    @property
    def usual(self) -> float | None:
        """The longest earlier silence in the current phase, in seconds."""
        return self._longest.get(self.phase)

    def limit(self, wanted: float | None) -> float:
        """Seconds that the process may be silent. `wanted`, the user's setting, overrides what was learned."""
        if wanted is not None:
            return wanted
        if self.last is None or not self.last.updates:
            return FIRST_STEP_SECONDS
        return max(MIN_STALL_SECONDS, _SILENT_STEPS * (self.usual_step or 0.0), _SILENCE_FACTOR * (self.usual or 0.0))
