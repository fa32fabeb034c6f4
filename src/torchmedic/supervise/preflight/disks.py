"""Checks of the folders that a run writes to. Runs as a separate program, because a lost file server never answers."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from torchmedic.diagnose.words.format import size
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn
from torchmedic.supervise.preflight.questions import Question

_LOW_BYTES = 2 << 30  # a checkpoint of 160 million parameters with Adam's state
_FULL_BYTES = 1 << 20
_MAX_ANSWER_SECONDS = 5.0
_NETWORK = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs fuse.sshfs fuse.glusterfs fuse.s3fs".split()
)


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    free: int
    inodes: int  # free; -1 for a file system that does not count them
    read_only: bool
    writable: bool
    kind: str = ""
    options: str = ""


def read_folder(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> Folder:
    """The state of a folder. May block forever."""
    found = os.statvfs(path)
    kind, options = _mount(os.path.realpath(path), mounts)
    return Folder(
        free=found.f_bavail * found.f_frsize,
        inodes=found.f_favail if found.f_files else -1,
        read_only=bool(found.f_flag & os.ST_RDONLY),
        writable=os.access(path, os.W_OK | os.X_OK),
        kind=kind,
        options=options,
    )


def _mount(path: str, mounts: Path) -> tuple[str, str]:
    """Type and options of the file system, from the longest mount point above the path."""
    best, found = "", ("", "")
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, (kind[0], f"{fields[5]},{kind[2]}")
    return found


def check(situation: Situation, ask: Callable[[str], Folder | str] | None = None) -> Iterator[Finding]:
    ask = ask or _ask
    try:
        yield _working(ask(os.getcwd()))
    except FileNotFoundError:
        yield fail("working folder", "it has been removed", "run in another folder")
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        reason = "no folder for temporary files can be written to"
        needs = "; DataLoader workers need one"
        yield (
            fail("temporary folder", reason + needs) if situation.workers else warn("temporary folder", reason + needs)
        )
        return
    yield _temporary(ask(temporary), temporary)


def _ask(path: str) -> Folder | str:
    """The state of a folder, read by a separate process, or the reason why it could not be read."""
    question = Question("torchmedic.supervise.preflight.disks", os.path.abspath(path))
    try:
        return msgspec.convert(question.line(_MAX_ANSWER_SECONDS), Folder)
    except TimeoutError:
        return f"{path} did not answer in {_MAX_ANSWER_SECONDS:g} s: its file system hangs"
    except (EOFError, msgspec.DecodeError, msgspec.ValidationError) as error:
        return f"{path} cannot be read: {error}"
    finally:
        question.close()


def _working(folder: Folder | str) -> Finding:
    name = "working folder"
    if isinstance(folder, str):
        return fail(name, folder, "run in another folder")
    room = f"{size(folder.free)} free"
    if folder.read_only or not folder.writable:
        why = "its file system is read-only" if folder.read_only else "it may not be written to"
        return warn(name, f"{why}: no checkpoint can be saved here", "run in another folder")
    if folder.free < _FULL_BYTES or folder.inodes == 0:
        why = room if folder.free < _FULL_BYTES else "no file can be made any more (out of inodes)"
        return fail(name, f"{why}: no checkpoint can be saved here", "free some space")
    if folder.free < _LOW_BYTES:
        return warn(name, f"{room}, little for checkpoints", "free some space, or save them elsewhere")
    if folder.kind in _NETWORK and "soft" not in folder.options.split(","):
        reason = (
            f"{room} on {folder.kind}: when its server does not answer, everything that is read or saved here waits"
        )
        return warn(name, reason, "keep data and checkpoints of a long run on a local disk")
    return ok(name, f"{room} ({folder.kind})" if folder.kind else room)


def _temporary(folder: Folder | str, path: str) -> Finding:
    name = "temporary folder"
    if isinstance(folder, str):
        return fail(name, folder, "set TMPDIR to another folder")
    room = f"{size(folder.free)} free in {path}"
    if folder.free < _FULL_BYTES or folder.inodes == 0:
        return warn(name, f"{room}: workers and torch.compile write there", "free some space, or set TMPDIR")
    if folder.kind in _NETWORK:
        return warn(
            name, f"{path} is on {folder.kind}: locks and sockets there can hang", "set TMPDIR to a local folder"
        )
    return ok(name, room)


if __name__ == "__main__":
    print(msgspec.json.encode(read_folder(sys.argv[1])).decode(), flush=True)
