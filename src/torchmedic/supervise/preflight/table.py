"""Prints the findings as a table or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec
from rich.text import Text

from torchmedic.records import encode
from torchmedic.report.console import stdout_console
from torchmedic.supervise.preflight.finding import Finding, Status

_STYLES: dict[Status, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
_MIN_WIDE_COLUMNS = 60  # on narrower terminals the finding is printed below the name of the check


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
