"""Memory warnings during the run, and how they become part of the diagnosis when memory does run out.

Processes that had no memory left to explain themselves are diagnosed from the few numbers that they wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from torchmedic.detect.failures.exhaustion import asked_of_host
from torchmedic.observe.memory.last_numbers import KIND, NoRoom
from torchmedic.observe.memory.limits import setter_of
from torchmedic.records import Diagnosis
from torchmedic.runfolder import events, files
from torchmedic.supervise.host.memory_guard import MemoryGuard, holders

_WARNINGS = "TM45"
_OF_HOST = "TM455"  # names no holder: only says that the host's memory is about to run out
_REFUSED = "TM4"
_KILLED = ("TM806", "TM417")


def new(guard: MemoryGuard) -> list[Diagnosis]:
    """Diagnoses of new alarms, each returned once."""
    alarms = guard.alarms()
    if not alarms:
        return []
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    return [found for alarm in alarms if (found := ask(alarm, registry.HOST)) is not None]


def folded(said: Sequence[Diagnosis], diagnosis: Diagnosis) -> list[Diagnosis]:
    """Add a diagnosis to the list; a warning that it confirms becomes part of it."""
    if diagnosis.severity != "error" or not diagnosis.code.startswith((_REFUSED, *_KILLED)):
        return [*said, diagnosis]
    known = [each for each in said if each.rank == diagnosis.rank and _is_part(each, diagnosis)]
    rest = [each for each in said if each not in known]
    for warning in known:
        when = f" at step {warning.step}" if warning.step is not None else ""
        told = f"{warning.code} had warned of it{when}: {warning.message}"
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, told))
        line = warning.cause_location
        lines = {(each.file, each.line) for each in diagnosis.locations}
        if line is not None and warning.code != _OF_HOST and (line.file, line.line) not in lines:
            diagnosis = replace(diagnosis, locations=(*diagnosis.locations, replace(line, role="holder")))
    return [*rest, diagnosis]


def _is_part(warning: Diagnosis, diagnosis: Diagnosis) -> bool:
    if warning.severity != "warning" or not warning.code.startswith(_WARNINGS):
        return False
    if warning.code == _OF_HOST or diagnosis.code in _KILLED:
        return True  # a killed process cannot say who held the memory
    one, two = warning.cause_location, diagnosis.cause_location
    if one is not None and two is not None and (one.file, one.line) == (two.file, two.line):
        return True
    return not _holders(warning.message).isdisjoint(_holders(diagnosis.message, *diagnosis.evidence))


def _holders(*texts: str) -> set[str]:
    """The names in backticks, each by its last identifier."""
    names = [re.sub(r"\[.*?\]", "", name) for text in texts for name in re.findall(r"`([\w.]+(?:\[[^`]*\])*)`", text)]
    return {name.rpartition(".")[2] for name in names} - {""}


def explained(folders: Iterable[Path]) -> list[Diagnosis]:
    """One diagnosis for every process that wrote its last numbers and no error."""
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    found = []
    for folder in folders:
        words = events.events_of(folder, KIND, NoRoom)
        if not words or any(each.severity == "error" for each in files.read_diagnoses(folder).values()):
            continue
        diagnosis = ask(_completed(words[0], folder), registry.OUT_OF_ROOM)
        if diagnosis is not None:
            found.append(diagnosis)
    return found


def _completed(word: NoRoom, folder: Path) -> NoRoom:
    """Add what the process had no memory to find out."""
    memory = word.memory
    name, limit = ("RLIMIT_AS", memory.address_limit) if memory.address_limit else ("RLIMIT_DATA", memory.data_limit)
    return msgspec.structs.replace(
        word,
        asked=asked_of_host(word.text),
        holders=holders(folder),
        setter=setter_of(name, limit, os.getpid()) if limit is not None else None,
    )
