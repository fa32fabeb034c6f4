"""How a training process gets on, by its black box, and how long it may be silent: learned from the run itself."""

from __future__ import annotations

from pathlib import Path

from torchmedic.observe.step.blackbox import Beat, Follower
from torchmedic.records import Phase

LEAST = 30.0  # seconds; whoever is silent for less is not worth a look
FIRST = 60.0  # before the first update: loading, compiling and tuning are done then
_STEPS = 5  # usual steps that a process may be silent for
_TIMES = 2  # the longest silence of a phase, times this, is nothing to worry about
_BEATS = 12  # of those since the last look: where there are more, none of them was silent for long
_WORK: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class Progress:
    """One process that trains."""

    def __init__(self, path: Path, now: float) -> None:
        self._box = Follower(path)
        self.pid = self._box.pid
        self.last: Beat | None = None
        self._moved: float = max(self._box.started, now - 1.0)
        self._longest: dict[Phase, float] = {}
        self._step_ended: float | None = None
        self.usual_step: float | None = None
        self.last_silence = 0.0  # the longest that ended within the last look

    @property
    def ended(self) -> bool:
        return self._box.clean_exit

    @property
    def trains(self) -> bool:
        return self.last is not None and self.last.updates > 0

    def look(self) -> bool:
        """Take in what is new; whether the process has got on since the last look."""
        moved = False
        for beat in self._box.new(_BEATS):
            if self._gets_on(beat):
                silence = beat.time - self._moved
                self.last_silence = max(self.last_silence, silence) if moved else silence
                self._moved = max(self._moved, beat.time)
                moved = True
            self._learn(beat)
            self.last = beat
        return moved

    def _gets_on(self, beat: Beat) -> bool:
        """To ask for data again and again is no progress by itself: an empty loader does just that."""
        last = self.last
        if last is None or beat.phase in _WORK or last.phase in _WORK:
            return True
        return (beat.step, beat.micro_step, beat.updates) != (last.step, last.micro_step, last.updates)

    def _learn(self, beat: Beat) -> None:
        last = self.last
        if last is None:
            return
        took = beat.time - last.time
        if last.updates:  # what comes before the first update says nothing of later steps
            self._longest[last.phase] = max(self._longest.get(last.phase, 0.0), took)
        if beat.updates > last.updates:
            if self._step_ended is not None:
                each = (beat.time - self._step_ended) / (beat.updates - last.updates)
                usual = self.usual_step
                self.usual_step = each if usual is None else usual + 0.1 * (min(each, 4 * usual) - usual)
            self._step_ended = beat.time

    def still(self, now: float) -> float:
        """For how many seconds it has not got on."""
        return max(0.0, now - self._moved)

    @property
    def phase(self) -> Phase:
        return self.last.phase if self.last is not None else "other"

    @property
    def usual(self) -> float | None:
        """The longest silence that its present phase has had before."""
        return self._longest.get(self.phase)

    def limit(self, wanted: float | None) -> float:
        """For how many seconds it may be silent. `wanted` is the user's word, which overrides what was learned."""
        if wanted is not None:
            return wanted
        if self.last is None or not self.last.updates:
            return FIRST
        return max(LEAST, _STEPS * (self.usual_step or 0.0), _TIMES * (self.usual or 0.0))
