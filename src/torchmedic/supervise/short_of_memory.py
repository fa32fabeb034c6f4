"""Diagnoses of processes that had no memory left to explain themselves, from the few numbers that they wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchmedic.detect.failures.exhaustion import asked_of_host
from torchmedic.observe.memory.last_numbers import KIND, NoRoom
from torchmedic.observe.memory.limits import setter_of
from torchmedic.records import Diagnosis
from torchmedic.runfolder import files
from torchmedic.supervise.host.memory_guard import holders


def explained(folders: Iterable[Path]) -> list[Diagnosis]:
    """One diagnosis for every process that wrote its last numbers and no error."""
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    found = []
    for folder in folders:
        words = files.events_of(folder, KIND, NoRoom)
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
