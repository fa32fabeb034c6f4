"""The logs of ranks on other hosts, exchanged through the store of the job itself.

Each host has a run folder of its own unless they share a disk. When a rank is asked why it stands still, when it fails
and when it ends, it leaves its log in the store (`MASTER_ADDR`, `MASTER_PORT`), and takes the logs that the other ranks
have left there into the folder of its own run. A connection of its own is used: the main thread may be waiting in the
connection of the job. What is taken is read as JSON and never unpickled, and it is bounded in size.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from torchmedic.records.ranks import Fate, RankLog, RemoteRank
from torchmedic.runfolder.files import REMOTE_RANKS, write_atomically
from torchmedic.runfolder.layout import new_folder
from torchmedic.settings import working_folder

_KEY = "torchmedic/rank/"
_CONNECT_SECONDS = 2.0
# For the logs of other ranks, which their own parents ask at about the same time, or which fail together with this one.
_WAIT_SECONDS = {"running": 2.5, "raised": 1.0}
_POLL_SECONDS = 0.1
_FRESH_SECONDS = 20.0  # a log that is older is of an earlier standstill
_MAX_CALLS = 400  # calls of one log, the last ones
_MAX_BYTES = 1 << 20  # bytes of a letter, and of what it unpacks to eight times that
_MAX_RANKS = 64  # whose logs are taken


class StoreMail:
    """The address of the store of a job."""

    def __init__(self, store: Any) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # some builds have none

        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        is_known = isinstance(store, TCPStore)
        self._address: tuple[str, int] | None = (store.host, store.port) if is_known else None

    def is_needed(self, log: RankLog) -> bool:
        """Whether some ranks are on other hosts, as far as the launcher tells."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        return self._address is not None and local.isdecimal() and int(local) < log.world_size

    def exchange(self, run: Path, log: RankLog, fate: Fate) -> None:
        """Leave a log in the store, and write the logs that others have left there to `run`."""
        store = self._connected()
        if store is not None:
            _exchange(store, run, log, fate)

    def _connected(self) -> Any:
        """A connection to the store; None where it is gone."""
        if self._address is None:
            return None
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with contextlib.suppress(OSError, RuntimeError):  # torch raises RuntimeErrors of its own
            socket.create_connection(self._address, _CONNECT_SECONDS).close()  # torch would try again and again
            limit = timedelta(seconds=_CONNECT_SECONDS)
            return TCPStore(*self._address, None, False, limit, wait_for_workers=False)
        return None


def _exchange(store: Any, run: Path, log: RankLog, fate: Fate) -> None:
    sent = msgspec.structs.replace(
        log, calls=log.calls[-_MAX_CALLS:], dropped=log.dropped + max(0, len(log.calls) - _MAX_CALLS)
    )
    letter = RemoteRank(log=sent, folder=str(working_folder()), fate=fate, time=time.time())
    store.set(f"{_KEY}{log.rank}", zlib.compress(msgspec.json.encode(letter)))
    folder = run / REMOTE_RANKS
    new_folder(folder, exist_ok=True)
    missing = {rank for rank in range(log.world_size) if rank != log.rank}
    if len(missing) > _MAX_RANKS:
        missing = set(sorted(missing)[:_MAX_RANKS])
    end = time.monotonic() + _WAIT_SECONDS.get(fate, 0.0)
    since = max((call.time for call in log.calls), default=0.0)
    older: dict[int, RemoteRank] = {}  # letters from before the last call of this rank: newer ones are waited for
    while True:
        for rank in sorted(missing):
            text = _text(store, rank)
            found = _opened(text) if text is not None else None
            if found is not None and (found.fate != "running" or found.time >= since):
                write_atomically(folder / f"{rank}.json", msgspec.json.encode(found))
                missing.discard(rank)
            elif found is not None:
                older[rank] = found
        if not missing or time.monotonic() >= end:
            break
        time.sleep(_POLL_SECONDS)
    for rank in missing & older.keys():
        if time.time() - older[rank].time < _FRESH_SECONDS:
            write_atomically(folder / f"{rank}.json", msgspec.json.encode(older[rank]))


def _text(store: Any, rank: int) -> bytes | None:
    key = f"{_KEY}{rank}"
    return bytes(store.get(key)) if store.check([key]) else None


def _opened(letter: bytes) -> RemoteRank | None:
    if len(letter) > _MAX_BYTES:
        return None
    with contextlib.suppress(zlib.error, msgspec.DecodeError):
        opener = zlib.decompressobj()
        return msgspec.json.decode(opener.decompress(letter, 8 * _MAX_BYTES), type=RemoteRank)
    return None
