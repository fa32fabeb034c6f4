"""The black boxes in a run folder, as the parent reads them. A box that cannot be read counts as missing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import BoxContents
from torchmedic.runfolder import files, layout

_STALL_MOMENTS = 64  # moments of a box that a report about a hang keeps


def read_box(folder: Path) -> BoxContents | None:
    """The black box in the folder of one process."""
    with contextlib.suppress(UnreadableRun):
        return blackbox.read(folder / files.BLACK_BOX)
    return None


def recent_box_of(run: Path, pid: int) -> BoxContents | None:
    """The black box of one process of the run, with its last moments only."""
    for folder in layout.process_folders(run):
        box = read_box(folder)
        if box is not None and box.pid == pid:
            return msgspec.structs.replace(box, moments=box.moments[-_STALL_MOMENTS:])
    return None
