"""All checks, in the order of the report. Nothing here imports torch, and nothing waits without a time limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.preflight import disks, forking, gpus, limits, memory, processors, script, waits
from torchmedic.supervise.preflight.cards import Cards
from torchmedic.supervise.preflight.facts import read_facts
from torchmedic.supervise.preflight.finding import Finding, Situation, warn
from torchmedic.supervise.preflight.questions import Question, torch_facts

Check = Callable[[Situation], Iterable[Finding]]
CHECKS: tuple[Check, ...] = (
    gpus.check,
    processors.check,
    memory.check,
    disks.check,
    limits.check,
    forking.check,
    waits.check,
    script.check,
)
_MAX_IMPORT_SECONDS = 90.0  # from a cold network disk
_MAX_TRIAL_SECONDS = 10.0  # for a trial that takes some milliseconds
_MAX_DRIVER_SECONDS = 15.0


def examine(path: Path | None) -> list[Finding]:
    """Check the host, and a script if one is given. Raises UsageError if it does not exist, or is not Python."""
    pressure = host_pressure.read()
    facts = read_facts(path, pressure.cpus) if path is not None else None
    environ = {**os.environ, **(facts.settings if facts is not None else {})}
    trial = (
        ("--try-backward", str(facts.threads or 0 if facts is not None else 0)) if "OMP_THREAD_LIMIT" in environ else ()
    )
    # Both take a second or two, so they run at the same time.
    torch = Question("torchmedic.observe.installation", *trial, environ=environ)
    cards = Question("torchmedic.supervise.preflight.cards", environ=environ)
    try:
        found = _cards(cards)
        # If the driver does not answer here, it does not answer torch either.
        told = torch_facts(
            torch,
            _MAX_IMPORT_SECONDS if found is not None else _MAX_DRIVER_SECONDS,
            _MAX_TRIAL_SECONDS if trial else None,
        )
        situation = Situation(environ=environ, pressure=pressure, script=facts, cards=found, torch=told)
    finally:
        torch.close()
        cards.close()
    return [finding for check in CHECKS for finding in _checked(check, situation)]


def _checked(check: Check, situation: Situation) -> Iterator[Finding]:
    """The findings of a check. An unexpected error in one check must not hide the findings of the others."""
    try:
        yield from check(situation)
    except Exception as error:
        name = check.__module__.rpartition(".")[2]
        yield warn(name, f"this could not be checked: {type(error).__name__}: {error}", "please report this")


def _cards(question: Question) -> Cards | None:
    """The GPUs; None if the driver does not answer."""
    try:
        return msgspec.convert(question.line(_MAX_DRIVER_SECONDS), Cards)
    except TimeoutError:
        return None
    except (EOFError, msgspec.DecodeError, msgspec.ValidationError) as error:
        return Cards(error=str(error))
