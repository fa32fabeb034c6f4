"""The run waits for the network or for storage.

What: a process waits in a read from (or a connection to) another machine or service, without a time limit, and has
received nothing since; or it waits in the kernel (state D), for a disk or a network file system that does not answer.

Why: a server that has accepted the connection and never answers, a connection that a firewall or a crash has cut
silently, a download without a timeout, a hung NFS or Lustre mount, a dead disk.

Cure: set a time limit for every wait (`requests.get(url, timeout=30)`, `urlopen(url, timeout=30)`,
`socket.setdefaulttimeout(30)`, `HF_HUB_DOWNLOAD_TIMEOUT`), and retry. For storage: check `dmesg` and `mount`; a process
in state D cannot be killed until the storage answers.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import frames_in
from torchmedic.diagnose.rules.hangs._counterparts import described, doing, hopeless, patience_is_over
from torchmedic.diagnose.rules.hangs._nobody_left import goes_on_beside
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule
from torchmedic.records import Grade, Severity
from torchmedic.records.process import FileWait
from torchmedic.records.stall import Stall

_FORKING = ("vfork", "kernel_clone", "do_exit")  # a parent waits so for a child that is about to begin
_MIN_BYTES_PER_SECOND = 1024
_MIN_DRIVER_SECONDS = 60.0  # in the GPU's driver: processes that start at the same time wait for each other there
_WORDS = {"connect": "to connect to", "accept": "for a connection at", "read": "for data from", "poll": "for data from"}


@stall_rule("TM523", "storage-or-network-wait")
def check(stall: Stall) -> Draft | None:
    for waiter in reversed(chain(stall)):
        if frames_in(waiter.python, "torch/distributed") is not None:
            continue
        if waiter.row.state == "D" and not _moves(waiter):
            return _storage(stall, waiter)
        wait = next((wait for wait in waiter.files if _is_network(stall, wait)), None)
        if wait is None or not waiter.stands(stall):
            continue
        if not waiter.ends_by_itself:
            return _network(stall, waiter, wait)
    return None


def _moves(waiter: Waiter) -> bool:
    process = waiter.process
    moved = max(process.bytes_read or 0.0, process.bytes_written or 0.0)
    return moved > _MIN_BYTES_PER_SECOND or waiter.row.wchan.startswith(_FORKING) or (waiter.row.wakes or 0.0) > 1


def _storage(stall: Stall, waiter: Waiter) -> Draft:
    row, process = waiter.row, waiter.process
    where = f" in `{row.wchan}`" if row.wchan else ""
    nvidia = row.wchan.startswith(("nv", "uvm", "os_acquire", "rm_"))
    what = "the driver of the GPU" if nvidia else "storage"
    file = next((wait.target for wait in waiter.files if wait.target), "")
    over = stall.still >= max(2 * stall.limit, _MIN_DRIVER_SECONDS if nvidia else 0.0)
    early = nvidia and not over  # the driver serves one process after the other: a start of CUDA takes it seconds
    draft = check.draft(stall, "likely")
    if early:
        draft.message = f"not hung yet: the run waits in the kernel for {what}"
    else:
        draft.message = f"the run waits in the kernel for {what}, which does not answer"
    draft.cause = f"{command(process, process.pid)} is in state D{where}: it neither runs nor can be interrupted"
    draft.at(at(waiter.frame, "cause", "waits here") or main_line(stall, "cause", "waits here"), main_line(stall))
    draft.because(f"the file is {file}" if file else "", "nothing was read or written during the examination")
    pressure = stall.pressure.io_full if stall.pressure is not None else None
    draft.because(f"all of the host stood still for {pressure:.0%} of the time, waiting for disks" if pressure else "")
    draft.help("see `dmesg` for the driver" if nvidia else "see `dmesg` and `mount`: does the file system answer?")
    return draft.rated("error" if over else "note" if early else "warning")


def _is_network(stall: Stall, wait: FileWait) -> bool:
    """A socket to somewhere else than a process of the run itself."""
    if wait.action in ("write", "lock", "open") or wait.wants == "write":
        return False
    if wait.remote or wait.connection or wait.target.startswith("tcp"):
        return True
    own = {process.pid for process in stall.processes}
    return wait.target.startswith("socket:") and bool(wait.peers) and own.isdisjoint(wait.peers)


def _network(stall: Stall, waiter: Waiter, wait: FileWait) -> Draft | None:
    others = [pid for pid in wait.peers if pid != waiter.process.pid]
    own = bool(wait.peers) and not others
    grade: Grade = "likely"
    severity: Severity = "note"
    if own:  # the server is a thread of the same process, or nobody
        if goes_on_beside(stall, waiter.process.pid, waiter.python):
            return None
        grade, severity = "proven", "error"
    elif others and hopeless(stall, others):
        grade, severity = "proven", "error"
    elif any(doing(stall, pid) == "goes on" for pid in others):
        severity = "note"
    elif patience_is_over(stall, others):
        severity = "error"
    where = wait.remote or wait.target
    process = waiter.process
    who = "the run" if process.pid == stall.pid else command(process, process.pid)
    if severity == "note":
        message = f"not hung yet: {who} waits {_WORDS[wait.action]} {where}"
    else:
        message = f"{who} waits {_WORDS[wait.action]} {where} without a time limit, and receives nothing"
    draft = check.draft(stall, grade, message, f"it stands in `{waiter.row.syscall}` on {wait.target}")
    draft.at(at(waiter.frame, "cause", "waits here") or main_line(stall, "cause", "waits here"), main_line(stall))
    state = f"the connection is {wait.connection}" if wait.connection else ""
    quiet = f"nothing was received for {duration(waiter.row.asleep)}" if waiter.row.asleep is not None else ""
    draft.because(", ".join(filter(None, (state, quiet))))
    draft.because(*(f"at the other end, on this host: {described(stall, pid)}" for pid in others[:3]))
    draft.because("the other end is in the same process, where no thread serves it" if own else "")
    draft.help("give it a time limit: `timeout=30`, or `socket.setdefaulttimeout(30)` for all")
    return draft.rated(severity)
