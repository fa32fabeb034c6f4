"""A run under a memory limit, with this test in the part of the kernel: it kills and counts as the OOM killer does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
from running import Finished, clean_environment

# A page that needs a limit begins with this line.
MARK = "# with 1 GiB of memory"
LIMIT = 1 << 30


def run_limited(folder: Path, source: str, limit: int = LIMIT) -> Finished:
    """Write a script and run it under torchmedic until it ends or holds more than the limit."""
    (folder / "train.py").write_text(source)
    tree = folder / "cgroup"
    _write_tree(tree, limit, 0)
    with (
        open(folder / "stdout", "wb") as out,
        open(folder / "stderr", "wb") as err,
        subprocess.Popen(
            [sys.executable, "-m", "torchmedic", "run", "--output", "run", "train.py"],
            cwd=folder,
            env=clean_environment(TORCHMEDIC_CGROUP_ROOT=str(tree)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        ) as process,
    ):
        end = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < end:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                with contextlib.suppress(psutil.Error):
                    if child.memory_info().rss > limit:
                        _write_tree(tree, limit, 1)
                        child.kill()
            time.sleep(0.005)
        process.kill()
    return Finished(
        process.returncode, (folder / "stdout").read_text(), (folder / "stderr").read_text(), folder / "run"
    )


def _write_tree(tree: Path, limit: int, kills: int) -> None:
    """Both versions of cgroups, whichever the machine lists for its processes."""
    (tree / "memory").mkdir(parents=True, exist_ok=True)
    (tree / "memory.max").write_text(f"{limit}\n")
    (tree / "memory.events").write_text(f"low 0\nhigh 0\nmax {kills}\noom {kills}\noom_kill {kills}\n")
    (tree / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (tree / "memory" / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
