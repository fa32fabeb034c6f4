"""What one check has to say, and what all of them look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from torchmedic.records.host import HostPressure
from torchmedic.supervise.preflight.cards import Cards
from torchmedic.supervise.preflight.facts import ScriptFacts
from torchmedic.supervise.preflight.questions import TorchFacts

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`fail` is for what will certainly break, `warn` for what may, with the number that it is based on."""

    check: str
    status: Status
    reason: str
    advice: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known before the run. What could not be read is None.

    `environ` is what the script will have, with what it sets itself before torch is imported.
    """

    environ: Mapping[str, str]
    pressure: HostPressure
    script: ScriptFacts | None = None
    torch: TorchFacts | None = None
    cards: Cards | None = None

    @property
    def cores(self) -> int:
        """How many CPUs the script may run on."""
        return self.pressure.cpus or os.cpu_count() or 1

    @property
    def share(self) -> float:
        """How many CPUs it can have the time of."""
        quota = self.pressure.cpu_quota
        return float(self.cores) if quota is None else min(quota, float(self.cores))

    @property
    def threads(self) -> int | None:
        """How many threads torch will compute with, as far as that can be known."""
        if self.script is not None and self.script.threads is not None:
            return self.script.threads
        return self.torch.threads if self.torch is not None else None

    @property
    def workers(self) -> int:
        """The most workers that one DataLoader of the script has, where that can be seen."""
        return max((loader.workers or 0 for loader in self.script.loaders), default=0) if self.script else 0


def ok(check: str, reason: str) -> Finding:
    return Finding(check=check, status="ok", reason=reason)


def warn(check: str, reason: str, advice: str = "") -> Finding:
    return Finding(check=check, status="warn", reason=reason, advice=advice)


def fail(check: str, reason: str, advice: str = "") -> Finding:
    return Finding(check=check, status="fail", reason=reason, advice=advice)
