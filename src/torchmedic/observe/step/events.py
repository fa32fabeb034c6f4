"""events.jsonl: what happened in one process, a line each, readable while it runs."""

from __future__ import annotations

import os
from os import write
from pathlib import Path
from time import time  # by name, as `write`: a script may replace what is in the module
from typing import Any

from torchmedic.records import Fault, encode_line
from torchmedic.runfolder.descriptors import out_of_the_way
from torchmedic.runfolder.events import EVENTS


class Events:
    """The log of one process, append-only; each line is written whole by one system call."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = out_of_the_way(os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        os.fchmod(self._descriptor, 0o600)
        self._file = os.fstat(self._descriptor)

    def write(self, kind: str, **fields: Any) -> bool:
        """Append a line; False where that failed: a full disk is no reason to stop anything."""
        line = encode_line({"kind": kind, "time": round(time(), 3), **fields}) + b"\n"
        try:
            if not os.path.samestat(os.fstat(self._descriptor), self._file):
                return False  # the script has closed our descriptor, and has a file of its own there
            return write(self._descriptor, line) == len(line)
        except OSError:
            return False

    def fault(self, fault: Fault) -> bool:
        return self.write("fault", fault=fault)

    def close(self) -> None:
        os.close(self._descriptor)
