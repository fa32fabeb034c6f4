"""Children of `multiprocessing` that died of an exception, in a run whose script ended well all the same."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from torchmedic.diagnose.registry import is_fallback
from torchmedic.records import Diagnosis
from torchmedic.runfolder import files
from torchmedic.runfolder.files import ExceptionLine


def unnoticed(folders: list[Path]) -> Diagnosis | None:
    """A warning about the first child that died, if any did. Explained failures have been reported already."""
    names, first = [], None
    for folder in folders:
        name = next((line.child for line in files.read_events(folder) if isinstance(line, ExceptionLine)), "")
        found = [each for each in files.read_diagnoses(folder).values() if is_fallback(each)]
        if name and found:
            names.append(name)
            first = first or found[0]
    if first is None:
        return None
    others = f"{len(names)} children of the script died of an exception: {', '.join(names[:8])}"
    return replace(
        first,
        severity="warning",
        grade="proven",
        message=f"the child process `{names[0]}` died of an exception, and the script went on to end well",
        evidence=(*first.evidence, *([others] if len(names) > 1 else [])),
        in_traceback=False,
    )
