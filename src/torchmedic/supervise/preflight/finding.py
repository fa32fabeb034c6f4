"""The result of a check, the facts that all checks read, and the findings as a table or as JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from rich.text import Text

from torchmedic.records import encode
from torchmedic.records.host import HostPressure
from torchmedic.report.console import stdout_console
from torchmedic.supervise.preflight.cards import Cards
from torchmedic.supervise.preflight.facts import ScriptFacts
from torchmedic.supervise.preflight.questions import TorchFacts

Status = Literal["ok", "warn", "fail"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
_MIN_WIDE_COLUMNS = 60  # on narrower terminals the finding is printed below the name of the check


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


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `--format json`. Fields are added, never renamed or removed."""

    schema: int = 1
    warnings: int
    failures: int
    checks: tuple[Finding, ...]


def as_json(found: Sequence[Finding]) -> str:
    return encode(
        Preflight(warnings=_count(found, "warn"), failures=_count(found, "fail"), checks=tuple(found))
    ).decode()


def show(found: Sequence[Finding]) -> None:
    console = stdout_console()
    # Failures come last, directly above the prompt.
    ordered = sorted(found, key=lambda finding: list(_STYLES).index(finding.status))
    name = max(len(finding.check) for finding in found) + 2
    beside = console.width >= _MIN_WIDE_COLUMNS
    for finding in ordered:
        head = Text(f"{finding.status:<6}", _STYLES[finding.status]).append(finding.check, "not bold default")
        indent = 6 + name if beside else 6
        words = textwrap.wrap(finding.reason, console.width - indent)
        if finding.advice:
            words += textwrap.wrap(f"help: {finding.advice}", console.width - indent)
        if beside:
            head.append(" " * (indent - len(head)) + words.pop(0), "not bold default")
        console.print(head, soft_wrap=True)
        for line in words:
            console.print(Text(" " * indent + line), soft_wrap=True)
    fails, warns = _count(found, "fail"), _count(found, "warn")
    parts = [f"{count} {word}" for count, word in ((fails, "failed"), (warns, "warned")) if count]
    console.print(f"\n{len(found)} checks, {', '.join(parts) or 'all ok'}")


def _count(found: Sequence[Finding], status: Status) -> int:
    return sum(finding.status == status for finding in found)
