"""A run under a memory limit, with this test in the part of the kernel: it kills and tells as the OOM killer does."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
from running import Finished, clean_environment
from zygote import Zygote

# A page that needs a limit begins with one of these lines: that of a container, or that of a whole machine.
MARK = "# with 1 GiB of memory"
HOST_MARK = "# on a machine with 1 GiB of memory"
LIMIT = 1 << 30


def run_limited(folder: Path, source: str, limit: int = LIMIT, *, high: int | None = None) -> Finished:
    """Write a script and run it under torchmedic until it ends or holds more than the limit."""
    (folder / "train.py").write_text(source)
    tree, log = folder / "cgroup", folder / "bin"
    whole = source.startswith(HOST_MARK)
    write_tree(tree, None if whole else limit, 0, high)
    _write_log(log, None)
    environment = clean_environment(TORCHMEDIC_CGROUP_ROOT=str(tree), PATH=f"{log}{os.pathsep}{os.environ['PATH']}")
    run = Zygote.start(folder, ["run", "--output", "run", "train.py"], environment, 250)
    while not run.is_over():
        for child in _children(run.pid):
            with contextlib.suppress(psutil.Error):
                if child.memory_info().rss > limit:
                    if whole:
                        _write_log(log, child.pid)
                    else:
                        write_tree(tree, limit, 1, high)
                    child.kill()
        time.sleep(0.02)
    return Finished(run.wait(), *Zygote.output(folder), folder / "run")


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        return psutil.Process(pid).children(recursive=True)
    return []


def write_tree(tree: Path, limit: int | None, kills: int, high: int | None) -> None:
    """Both versions of cgroups, whichever the machine lists for its processes."""
    (tree / "memory").mkdir(parents=True, exist_ok=True)
    (tree / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (tree / "memory.high").write_text("max\n" if high is None else f"{high}\n")
    (tree / "memory.events").write_text(f"low 0\nhigh 0\nmax {kills}\noom {kills}\noom_kill {kills}\n")
    (tree / "memory" / "memory.limit_in_bytes").write_text(f"{limit or 9223372036854771712}\n")
    (tree / "memory" / "memory.failcnt").write_text(f"{7 * kills}\n")
    (tree / "memory" / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def _write_log(folder: Path, killed: int | None) -> None:
    """A `dmesg` that tells of one process."""
    folder.mkdir(exist_ok=True)
    stamp = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    line = f"[{stamp:12.6f}] Out of memory: Killed process {killed} (python) total-vm:2097152kB" if killed else ""
    (folder / "dmesg.new").write_text(f"#!/bin/sh\necho '{line}'\n")
    (folder / "dmesg.new").chmod(0o755)
    (folder / "dmesg.new").rename(folder / "dmesg")
