"""Scripts watched by an agent and by nobody above it, where the supervisor has no part in what is tested.

What only `torchmedic run` itself can show is tested with `running.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from running import clean_environment
from zygote import Zygote

from torchmedic.records import Diagnosis, Fault
from torchmedic.runfolder.events import read_faults
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.runfolder.layout import process_folders


class Watched(msgspec.Struct):
    """A script that is over."""

    status: int
    diagnoses: list[Diagnosis]
    faults: list[Fault]
    output: str


def watch_script(folder: Path) -> Watched:
    """Run `train.py` of a folder."""
    run = folder / "run"
    run.mkdir()
    status, output = Zygote.watch(folder, "train.py", run, clean_environment(), 250)
    parts = process_folders(run)
    return Watched(
        status,
        [found for part in parts for found in read_diagnoses(part).values()],
        [fault for part in parts for fault in read_faults(part)],
        output,
    )
