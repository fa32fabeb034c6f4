"""Not all ranks came to the place where the job begins.

What: in `init_process_group` all ranks register with rank 0, at `MASTER_ADDR` and `MASTER_PORT`. The time for that ran
out before all of them had registered.

Why: a rank that was never started, or ended before it came here; a world size that is larger than the number of
processes; another address or port on some ranks; a firewall or a wrong network interface between two machines. With
`init_method="file://..."`, a file that an earlier job has left: it holds the addresses of processes that have ended.

Cure: start as many processes as `WORLD_SIZE` says, with the same `MASTER_ADDR` and `MASTER_PORT`. Look at the ranks
that are missing: their own output tells why they ended. Give each job a file of its own, or remove it first.
"""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path
from urllib.parse import urlsplit

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame

_JOINED = re.compile(r"(\d+)/(\d+) clients joined")
_UNREACHABLE = re.compile(r"while trying to connect to \(([^,()]+), (\d+)\)")
_KEY = re.compile(r"keys: /default_pg/\S*/(\d+)$", re.M)  # under which a rank of gloo leaves its address
_UNCONNECTED = "connectFullMesh failed"  # of gloo. Whether it says "refused" or "timeout" is up to chance
_REFUSED = "Connection refused"
_MAX_FILE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_WAITED = re.compile(r"[Tt]imed out after (\d+) seconds|timeout after (\d+) ?ms|timed out after (\d+) ?ms")


@rule("TM711", "ranks-did-not-meet")
def check(evidence: RaisedEvidence) -> Draft | None:
    joining = evidence.inside("init_process_group")
    waited = _WAITED.search(evidence.message)
    if joining is not None and _UNCONNECTED in evidence.message:
        return _unconnected(evidence, joining)
    if joining is None or waited is None:
        return None
    given = joining.variables.get("rank")  # a process of `mp.spawn` has no other number before it has joined
    rank = given if isinstance(given, int) and given >= 0 else evidence.rank
    seconds = float(waited[1] or 0) or float(waited[2] or waited[3] or 0) / 1000
    joined, unreachable = _JOINED.search(evidence.message), _UNREACHABLE.search(evidence.message)
    if joined is not None:
        return _not_all(evidence, int(joined[1]), int(joined[2]), seconds)
    if unreachable is not None:
        where = f"{unreachable[1]}:{unreachable[2]}"
        draft = check.draft(evidence, "likely")
        draft.message = f"rank {rank} could not reach rank 0 at {where}"
        draft.cause = (
            f"nobody answered there as rank 0 does within {seconds:g} s: rank 0 is not there, listens on another "
            "address or port, or the network does not let this rank through"
        )
        draft.help("compare `MASTER_ADDR` and `MASTER_PORT` of all ranks, and check that rank 0 has started")
    else:
        # Rank 0 waits for each of the others; those wait for rank 0, which answers when all have come.
        key = _KEY.search(evidence.message) if rank == 0 else None
        draft = check.draft(evidence, "likely")
        draft.message = (
            f"{f'rank {key[1]}' if key is not None else 'another rank'} did not join the job in {seconds:g} s"
        )
        draft.cause = f"rank {rank} waited for it in vain"
        draft.because(f"world size {world}" if (world := joining.variables.get("world_size", -1)) > 0 else "")
        draft.help("check that as many processes were started as the world size says")
    return _placed(draft, evidence)


def _unconnected(evidence: RaisedEvidence, joining: Frame) -> Draft | None:
    """Nobody is at an address that was read from a file. A store in memory has no addresses of an earlier job."""
    method = joining.variables.get("init_method")
    if not isinstance(method, str) or not method.startswith("file:"):
        return None
    registered = _registrations(Path(urlsplit(method).path), joining.variables.get("rank"))
    if registered < 2 and _REFUSED not in evidence.message:
        return None  # somebody may be there, whom this rank cannot reach
    draft = check.draft(evidence, "likely", f"`{method}` holds the address of a process that has ended")
    draft.cause = "the connection was refused: the file is that of an earlier job, or a rank has ended already"
    if registered > 1:
        draft.cause = "nobody answered at the address: the file is that of an earlier job"
        draft.because(f"this rank stands {registered} times in the file: an earlier process wrote into it, too")
    draft.help("give each job a new file, or remove the file before the job begins")
    return _placed(draft, evidence)


def _registrations(path: Path, rank: object) -> int:
    """How many processes have left an address for a rank in the file of a store, which only ever grows."""
    data = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES)
    keys: list[bytes] = []
    while len(data) >= _LENGTH.size:  # a key and its value follow one another, each behind its length
        (length,) = _LENGTH.unpack_from(data)
        keys.append(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
    return (
        sum(re.fullmatch(rb"/default_pg/\S*/%d" % rank, key) is not None for key in keys[::2])
        if isinstance(rank, int)
        else 0
    )


def _not_all(evidence: RaisedEvidence, joined: int, world: int, seconds: float) -> Draft:
    """Rank 0 counts who has come. It counts itself."""
    missing = "rank 1" if world == 2 else "every other rank" if joined == 1 else f"{world - joined} of them"
    draft = check.draft(evidence, "proven")
    draft.message = f"{joined} of {world} ranks joined the job in {seconds:g} s"
    draft.cause = f"the world size is {world}, and {missing} did not come"
    draft.help(
        f"start {world} processes with the same `MASTER_ADDR`, `MASTER_PORT` and world size; the output of the missing "
        "ranks tells why they ended"
    )
    return _placed(draft, evidence)


def _placed(draft: Draft, evidence: RaisedEvidence) -> Draft:
    return draft.at(*evidence.at_user_line("cause", "the ranks meet here"))
