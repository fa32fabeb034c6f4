"""Processes that had no memory left to explain themselves: the parent does it, by the word that they have left."""

from __future__ import annotations

import contextlib
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
    """One diagnosis for every process that has left word, and no diagnosis of an error."""
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    found = []
    for folder in folders:
        word = _word_of(folder)
        if word is None or any(each.severity == "error" for each in files.read_diagnoses(folder).values()):
            continue
        diagnosis = ask(word, registry.OUT_OF_ROOM)
        if diagnosis is not None:
            found.append(diagnosis)
    return found


def _word_of(folder: Path) -> NoRoom | None:
    with contextlib.suppress(OSError):
        for line in (folder / files.EVENTS).read_bytes().splitlines():
            if f'"{KIND}"'.encode() in line:
                with contextlib.suppress(msgspec.DecodeError):
                    return _completed(msgspec.json.decode(line, type=NoRoom), folder)
    return None


def _completed(word: NoRoom, folder: Path) -> NoRoom:
    """With what is better found out where there is room."""
    memory = word.memory
    name, limit = ("RLIMIT_AS", memory.address_limit) if memory.address_limit else ("RLIMIT_DATA", memory.data_limit)
    return msgspec.structs.replace(
        word,
        asked=asked_of_host(word.text),
        holders=holders(folder),
        setter=setter_of(name, limit, os.getpid()) if limit is not None else None,
    )
