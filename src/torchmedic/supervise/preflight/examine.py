"""All checks, in the order in which they are shown. Nothing here imports torch, and nothing waits without a limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.preflight import disks, forking, gpus, installed, limits, memory, processors, script, waits
from torchmedic.supervise.preflight.cards import Cards
from torchmedic.supervise.preflight.facts import read_facts
from torchmedic.supervise.preflight.finding import Finding, Situation, warn
from torchmedic.supervise.preflight.questions import Question, torch_facts

Check = Callable[[Situation], Iterable[Finding]]
CHECKS: tuple[Check, ...] = (
    installed.check,
    gpus.check,
    processors.check,
    memory.check,
    disks.check,
    limits.check,
    forking.check,
    waits.check,
    script.check,
)
_IMPORT = 90.0  # seconds; from a cold network disk it takes that long
_TRIAL = 10.0  # for what takes some milliseconds
_DRIVER = 15.0


def examine(path: Path | None) -> list[Finding]:
    """Check the host, and a script if one is given.

    Raises:
        UsageError: The script is not there, or is not Python.
    """
    pressure = host_pressure.read()
    facts = read_facts(path, pressure.cpus) if path is not None else None
    environ = {**os.environ, **(facts.settings if facts is not None else {})}
    trial = (
        ("--try-backward", str(facts.threads or 0 if facts is not None else 0)) if "OMP_THREAD_LIMIT" in environ else ()
    )
    # Both take a second or two: at the same time.
    torch = Question("torchmedic.observe.installation", *trial, environ=environ)
    cards = Question("torchmedic.supervise.preflight.cards", environ=environ)
    try:
        found = _cards(cards)
        # Where the driver does not answer us, it does not answer torch either.
        told = torch_facts(torch, _IMPORT if found is not None else _DRIVER, _TRIAL if trial else None)
        situation = Situation(environ=environ, pressure=pressure, script=facts, cards=found, torch=told)
    finally:
        torch.close()
        cards.close()
    return [finding for check in CHECKS for finding in _checked(check, situation)]


def _checked(check: Check, situation: Situation) -> Iterator[Finding]:
    """What a check finds; a host that surprises one of them must not hide what the others see."""
    try:
        yield from check(situation)
    except Exception as error:
        name = check.__module__.rpartition(".")[2]
        yield warn(name, f"this could not be checked: {type(error).__name__}: {error}", "please report this")


def _cards(question: Question) -> Cards | None:
    """None if the driver does not answer."""
    try:
        return msgspec.convert(question.line(_DRIVER), Cards)
    except TimeoutError:
        return None
    except (EOFError, msgspec.DecodeError, msgspec.ValidationError) as error:
        return Cards(error=str(error))
