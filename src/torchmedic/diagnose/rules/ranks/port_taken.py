"""The port on which the ranks were to meet is in use by another program.

What: rank 0 opens a port (`MASTER_PORT`) on which all ranks register. Another socket on this machine listens on it.

Why: a job before this one that has not ended, a second job with the same port (29500 is the default of many launchers),
a server that was given the same port. Or two processes of the job both call themselves rank 0.

Cure: give every process of the job a rank of its own. Else end the old job, or choose another port: `torchrun
--master-port`, `MASTER_PORT`, or `--standalone`, which takes a free one.
"""

from __future__ import annotations

import contextlib
import os
import re

import psutil

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.runfolder import questions

_PORT = re.compile(r"port: (\d+)")
_MAX_COMMAND = 80  # characters


@rule("TM710", "port-taken")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.says("EADDRINUSE") and not evidence.says("address already in use"):
        return None
    if evidence.inside("init_process_group", "_create_c10d_store", "rendezvous") is None:
        return None
    found = _PORT.search(evidence.message)
    port = found[1] if found is not None else os.environ.get("MASTER_PORT", "")
    pid = _holder(int(port)) if port.isdecimal() else None
    draft = check.draft(evidence, "proven")
    agent = evidence.incident.agent
    if pid is not None and agent is not None and pid in questions.listeners(agent.run) and not _is_above(pid):
        draft.message = "two processes of the job take the part of rank 0"
        draft.cause = f"processes {pid} and {os.getpid()} of this run both open port {port}, as only rank 0 does"
        draft.at(*evidence.at_user_line("cause", "the rank that is given here is 0 in both processes"))
        return draft.help("give every process a rank of its own: the number that the launcher or `spawn` passes")
    draft.message = (
        f"port {port}, on which the ranks were to meet, is taken" if port else "the port of the job is taken"
    )
    draft.cause = f"rank {evidence.rank} could not listen on it: {_words(pid)}"
    draft.at(*evidence.at_user_line("cause", "the port is opened here"))
    return draft.help(
        "end the program that holds the port, or set `MASTER_PORT` (torchrun: `--master-port`) to a free one"
    )


def _holder(port: int) -> int | None:
    """The process that listens on a port; None if that cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return int(each.pid)
    return None


def _is_above(pid: int) -> bool:
    """Whether a process is this one, or has started it: no other rank of the job."""
    with contextlib.suppress(psutil.Error, OSError):
        return pid in (os.getpid(), *(each.pid for each in psutil.Process().parents()))
    return True


def _words(pid: int | None) -> str:
    if pid == os.getpid():
        return "this process itself listens on it already"
    with contextlib.suppress(psutil.Error, OSError):
        if pid is not None:
            return f"process {pid} (`{' '.join(psutil.Process(pid).cmdline())[:_MAX_COMMAND]}`) listens on it"
    return "another program does"
