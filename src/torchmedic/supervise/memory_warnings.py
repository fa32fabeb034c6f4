"""Warnings of memory while the run goes on, and which of them are said again, and better, when it has ended."""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.records import Diagnosis
from torchmedic.supervise.host_guard import HostGuard

_WARNINGS = "TM45"
_ENDINGS = ("TM4", "TM806")


def new(guard: HostGuard) -> list[Diagnosis]:
    """What the guard has to say, once."""
    alarms = guard.alarms()
    if not alarms:
        return []
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    return [found for alarm in alarms if (found := ask(alarm, registry.HOST)) is not None]


def still_new(said: Sequence[Diagnosis], diagnosis: Diagnosis) -> list[Diagnosis]:
    """What of that which was said is not told again by a diagnosis: memory that has ended was about to end before."""
    if diagnosis.severity != "error" or not diagnosis.code.startswith(_ENDINGS):
        return list(said)
    return [each for each in said if not (each.code.startswith(_WARNINGS) and each.rank == diagnosis.rank)]
