"""The result of a check, and the facts that all checks read."""

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
    """The result of a check: `fail` if the run will certainly break, `warn` if it may. The reason includes figures."""

    check: str
    status: Status
    reason: str
    advice: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known before the run. None where a fact could not be read.

    `environ` is the environment of the script, including what the script sets before it imports torch.
    """

    environ: Mapping[str, str]
    pressure: HostPressure
    script: ScriptFacts | None = None
    torch: TorchFacts | None = None
    cards: Cards | None = None

    @property
    def cores(self) -> int:
        """Number of CPUs that the script may run on."""
        return self.pressure.cpus or os.cpu_count() or 1

    @property
    def share(self) -> float:
        """CPU time that the script can get, in CPUs: the cores, or the quota if that is lower."""
        quota = self.pressure.cpu_quota
        return float(self.cores) if quota is None else min(quota, float(self.cores))

    @property
    def threads(self) -> int | None:
        """Number of threads that torch will compute with; None if unknown."""
        if self.script is not None and self.script.threads is not None:
            return self.script.threads
        return self.torch.threads if self.torch is not None else None

    @property
    def workers(self) -> int:
        """The largest number of workers of any DataLoader in the script, as far as the source shows it."""
        return max((loader.workers or 0 for loader in self.script.loaders), default=0) if self.script else 0


def ok(check: str, reason: str) -> Finding:
    return Finding(check=check, status="ok", reason=reason)


def warn(check: str, reason: str, advice: str = "") -> Finding:
    return Finding(check=check, status="warn", reason=reason, advice=advice)


def fail(check: str, reason: str, advice: str = "") -> Finding:
    return Finding(check=check, status="fail", reason=reason, advice=advice)
