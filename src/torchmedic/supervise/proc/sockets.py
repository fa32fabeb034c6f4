"""The other end of a socket: its address, and its socket if that is on this host."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

import msgspec

from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc.process import PROC

_STATES = (
    "ESTABLISHED SYN_SENT SYN_RECV FIN_WAIT1 FIN_WAIT2 TIME_WAIT CLOSE CLOSE_WAIT LAST_ACK LISTEN CLOSING NEW_SYN_RECV"
).split()
_INODE = re.compile(r"socket:\[(\d+)\]")

_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST, _SHOW_PEER, _PEER = 4, 20, 1, 4, 2


class Socket(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection.

    `peer` is the target (`socket:[inode]`) of the other end's descriptors, if it is on this host; before the connection
    is accepted, the target of the listening socket.
    """

    kind: str
    local: str = ""
    remote: str = ""
    state: str = ""
    peer: str = ""


def describe(pid: int, target: str, *, proc: Path = PROC) -> Socket | None:
    """The socket with a target (`socket:[inode]`), as a process sees it."""
    match = _INODE.fullmatch(target)
    if match is None:
        return None
    return _tcp(pid, match[1], proc) or _unix(int(match[1]))


def _tcp(pid: int, inode: str, proc: Path) -> Socket | None:
    rows: list[list[str]] = []
    for name in ("tcp", "tcp6"):
        rows += [line.split() for line in (text(f"{proc}/{pid}/net/{name}") or "").splitlines()[1:]]
    own = next((row for row in rows if len(row) > 9 and row[9] == inode), None)
    if own is None:
        return None
    local, remote, state = _address(own[1]), _address(own[2]), int(own[3], 16)
    others = (row for row in rows if len(row) > 9 and row[9] not in (inode, "0"))
    ends = ((_address(row[1]), _address(row[2]), row[9]) for row in others if row[3] == own[3])
    peer = next((other for here, there, other in ends if (here, there) == (remote, local)), "")
    if not peer and _is_here(remote, local):  # not accepted yet: take the listening socket
        peer = next((row[9] for row in rows if len(row) > 9 and row[3] == "0A" and _listens(row[1], remote)), "")
    return Socket(
        kind="tcp",
        local=local,
        remote="" if remote.endswith(":0") else remote,
        state=_STATES[state - 1] if 0 < state <= len(_STATES) else "",
        peer=f"socket:[{peer}]" if peer else "",
    )


def _is_here(remote: str, local: str) -> bool:
    host, _, port = remote.rpartition(":")
    return port != "0" and (host.startswith("127.") or host in ("[::1]", local.rpartition(":")[0]))


def _listens(listening: str, remote: str) -> bool:
    here = _address(listening)
    any_address = here.startswith(("0.0.0.0:", "[::]:"))
    return here == remote or (any_address and here.rpartition(":")[2] == remote.rpartition(":")[2])


def _address(words: str) -> str:
    """Convert `0100007F:1F90` to `127.0.0.1:8080`. The kernel writes 32-bit words in the byte order of the host."""
    address, _, port = words.partition(":")
    raw = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    if len(raw) == 16 and raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"


def _unix(inode: int) -> Socket | None:
    """The peer of a Unix socket, from the kernel's socket diagnosis interface, which needs no privileges."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        return None
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, _SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)
    header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _REQUEST, 1, 0)
    try:
        with socket.socket(family, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(0.2)
            link.send(header + request)
            answer = link.recv(8192)
    except OSError:
        return None
    if len(answer) < 32 or struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
        return None
    at, peer = 32, 0
    while at + 4 <= len(answer):
        length, kind = struct.unpack_from("=HH", answer, at)
        if length < 4:
            break
        if kind == _PEER and length >= 8:
            (peer,) = struct.unpack_from("=I", answer, at + 4)
        at += (length + 3) & ~3
    return Socket(kind="unix", peer=f"socket:[{peer}]" if peer else "")
