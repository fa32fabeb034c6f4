"""The black boxes of a run, as the parent process keeps and reads them. A box that cannot be read counts as missing.

The rings of collectives (`runfolder/ring.py`) are kept in the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmedic.contained import contained
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import BoxContents
from torchmedic.runfolder import black_box, events, files, layout, ring
from torchmedic.supervise.folder_news import FolderNews

_STALL_MOMENTS = 64  # moments of a box that a report about a hang keeps
_MAX_WAITING = 256  # processes that may hand their boxes over at the same time
_MAX_NAME_BYTES = 255
_INTERVAL_SECONDS = 0.95
_COPY_INTERVAL_SECONDS = 3.0  # of the rings of collectives
_SAVE_INTERVAL_SECONDS = 60.0  # for the case that this process is killed, which ends the whole run


class _Kept(NamedTuple):
    descriptor: int
    pid: int
    was_alive: bool  # false where the process has its own process numbers, as in a container


class _KeptRing(NamedTuple):
    copier: ring.Copier
    was_alive: bool


class BoxKeeper:
    """Receives the black boxes of all processes of a run, and writes each to its folder when its process has ended.

    The rings of collectives are also written every few seconds, for ranks on other hosts.
    """

    def __init__(self, run: Path, rank: int | None) -> None:
        self._run = run
        self._address = layout.box_address(run, rank)
        self._boxes: dict[str, _Kept] = {}
        self._rings: list[_KeptRing] = []
        self._copy_due = 0.0
        self._closed = False
        self._due = 0.0
        self._save_due = time.monotonic() + _SAVE_INTERVAL_SECONDS
        self._news = FolderNews()
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # a file system without sockets
            self._socket = self._listen()

    def _listen(self) -> socket.socket:
        # Above the standard streams: one of them may be closed, and must stay so for the script.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as low:
            listening = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3))
        listening.setblocking(False)
        with contextlib.suppress(OSError):  # of an earlier attempt of the same rank
            self._address.unlink()
        with blackbox.reachable(self._address) as short:
            listening.bind(short)
        self._address.chmod(0o600)
        listening.listen(_MAX_WAITING)
        return listening

    @contained("supervise.boxes")
    def look(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _INTERVAL_SECONDS
        self._receive()
        for name, kept in list(self._boxes.items()):
            if kept.was_alive and not os.path.exists(f"/proc/{kept.pid}"):
                self._save(name, kept)
                os.close(kept.descriptor)
                del self._boxes[name]
        self._copy_rings(now)
        if now > self._save_due:
            self._save_due = now + _SAVE_INTERVAL_SECONDS
            for name, kept in self._boxes.items():
                self._save(name, kept)

    def _copy_rings(self, now: float) -> None:
        is_due = now > self._copy_due
        if is_due and self._rings:
            self._copy_due = now + _COPY_INTERVAL_SECONDS
        for kept in list(self._rings):
            has_ended = kept.was_alive and not os.path.exists(f"/proc/{kept.copier.pid}")
            if has_ended:
                self._end_ring(kept)
            elif is_due:
                with contextlib.suppress(OSError):
                    kept.copier.copy()

    def _end_ring(self, kept: _KeptRing) -> None:
        with contextlib.suppress(OSError):
            kept.copier.copy()
        os.close(kept.copier.descriptor)
        self._rings.remove(kept)

    @contained("supervise.boxes")
    def close(self) -> None:
        """Write all boxes to the run folder after the end of the run. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._receive()
        for name, kept in self._boxes.items():
            self._save(name, kept)
            os.close(kept.descriptor)
        self._boxes.clear()
        for ring_kept in list(self._rings):
            self._end_ring(ring_kept)
        if self._socket is not None:
            self._socket.close()
        with contextlib.suppress(OSError):
            self._address.unlink()

    def _receive(self) -> None:
        """Take the boxes that were handed over, or those that can be found where nothing can be handed over."""
        if self._socket is None:
            for folder in layout.process_folders(self._run) if self._news.may_have_changed(self._run) else ():
                path = box_path(folder)
                if folder.name not in self._boxes and path is not None and path.parent != folder:
                    with contextlib.suppress(OSError):
                        self._keep(folder.name, os.open(path, os.O_RDONLY))
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                channel, _ = self._socket.accept()
                with channel, contextlib.suppress(OSError):
                    channel.setblocking(False)
                    name, descriptors, _, _ = socket.recv_fds(channel, _MAX_NAME_BYTES, 1)
                    for descriptor in descriptors:
                        self._keep(os.fsdecode(name), descriptor)

    def _keep(self, name: str, descriptor: int) -> None:
        folder, _, file = name.partition("/")
        if file == ring.FILE:
            self._keep_ring(Path(folder).name, descriptor)
            return
        try:
            pid = black_box.Follower(Path(f"/proc/self/fd/{descriptor}")).pid
        except UnreadableRun:
            os.close(descriptor)
            return
        before = self._boxes.pop(name, None)
        if before is not None:
            os.close(before.descriptor)
        self._boxes[name] = _Kept(descriptor, pid, os.path.exists(f"/proc/{pid}"))

    def _keep_ring(self, folder: str, descriptor: int) -> None:
        try:
            copier = ring.Copier(descriptor, self._run / folder / ring.FILE)
        except (OSError, UnreadableRun):
            os.close(descriptor)
            return
        self._rings.append(_KeptRing(copier, os.path.exists(f"/proc/{copier.pid}")))

    def _save(self, name: str, kept: _Kept) -> None:
        path = self._run / Path(name).name / files.BLACK_BOX
        with contextlib.suppress(OSError):  # a full disk
            files.write_atomically(path, black_box.bytes_of(kept.descriptor))


def box_path(folder: Path) -> Path | None:
    """Where the black box of one process can be read: in memory while the process lives, then in its folder."""
    for line in events.events_of(folder, "start", events.StartLine):
        if line.box is not None:
            link = f"/proc/{line.pid}/fd/{line.box}"
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{blackbox.MEMORY_NAME}"):
                    return Path(link)
    path = folder / files.BLACK_BOX
    return path if path.exists() else None


def read_box(folder: Path) -> BoxContents | None:
    """The black box of the process with this folder."""
    with contextlib.suppress(UnreadableRun):
        path = box_path(folder)
        return None if path is None else black_box.read(path, follow=path.parent != folder)
    return None


def recent_box_of(run: Path, pid: int) -> BoxContents | None:
    """The black box of one process of the run, with its last moments only."""
    for folder in layout.process_folders(run):
        box = read_box(folder)
        if box is not None and box.pid == pid:
            return msgspec.structs.replace(box, moments=box.moments[-_STALL_MOMENTS:])
    return None


def micro_steps_of(box: BoxContents) -> int:
    """The usual number of backwards for one update, of those that a black box has whole; 0 if it has none."""
    made: dict[int, int] = {}
    for each in box.moments:
        made[each.step] = max(each.micro_step, made.get(each.step, 0))
    return statistics.mode([*made.values()][1:-1] or [0])
