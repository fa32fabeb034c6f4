"""What the parent reads of the host: cgroups of both versions, the kernel's log, how others ended."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from torchmedic.records.memory import MemoryLimits
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.host.watch import HostWatch, exit_status


def test_version_2(tmp_path: Path) -> None:
    group = tmp_path / "fs" / "user.slice" / "job"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (group / "memory.max").write_text("1073741824\n")
    (group / "memory.peak").write_text("1000\n")
    (tmp_path / "cgroup").write_text("0::/user.slice/job\n")
    found = postmortem.memory_limits(tmp_path / "cgroup", tmp_path / "fs")
    assert found == MemoryLimits(oom_kills=2, limit=1 << 30, peak=1000, hits=3)


def test_the_limit_of_a_group_around_the_own_one_counts(tmp_path: Path) -> None:
    pod, own = tmp_path / "fs" / "pod", tmp_path / "fs" / "pod" / "container"
    own.mkdir(parents=True)
    (own / "memory.events").write_text("high 4\nmax 0\noom 0\noom_kill 1\n")
    (own / "memory.max").write_text("max\n")
    (own / "memory.high").write_text("4096000\n")
    (pod / "memory.events").write_text("high 0\nmax 9\noom 5\noom_kill 8\n")
    (pod / "memory.max").write_text("8192000\n")
    (pod / "memory.high").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/pod/container\n")
    found = postmortem.memory_limits(tmp_path / "cgroup", tmp_path / "fs")
    assert found == MemoryLimits(oom_kills=1, limit=8192000, high=4096000, hits=5)


def test_version_2_in_a_container_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/../../outside\n")
    assert postmortem.memory_limits(tmp_path / "cgroup", tmp_path) == MemoryLimits(oom_kills=0)


def test_version_1(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "docker" / "abc"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    assert postmortem.memory_limits(tmp_path / "cgroup", tmp_path) == MemoryLimits(oom_kills=5)


def test_nothing_to_be_seen(tmp_path: Path) -> None:
    assert postmortem.memory_limits(tmp_path / "no", tmp_path) == MemoryLimits()
    (tmp_path / "cgroup").write_text("0::/\n")
    assert postmortem.memory_limits(tmp_path / "cgroup", tmp_path) == MemoryLimits()
    assert postmortem.host_oom_kills(tmp_path / "no") is None


def test_lines_of_the_kernel_about_one_process() -> None:
    log = """[   10.000000] Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB
[  200.500000] Out of memory: Killed process 77 (python) total-vm:2kB
[  201.000000] Out of memory: Killed process 770 (python) total-vm:3kB
[  202.000000] python[77]: segfault at 0 ip 0
no stamp, process 77"""
    found = postmortem.lines_about(log, 77, since=100)
    assert [line.split()[1] for line in found] == ["200.500000]", "202.000000]"]


def test_how_a_process_that_is_not_ours_has_ended(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    # The shell is our child, what it starts is not.
    shell = subprocess.Popen(
        ["bash", "-c", "sleep 100 & echo $!; (exit 3) & echo $!; wait %1; sleep 0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert shell.stdout is not None
    victim = int(shell.stdout.readline())
    watch = HostWatch(tmp_path)
    (tmp_path / "stacks" / f"{victim}.txt").write_text("")
    time.sleep(0.25)
    watch.look()
    os.kill(victim, 9)
    shell.communicate()
    watch.last_look()

    if watch.ended == {}:
        pytest.skip("this kernel tells the end of a process only to its parent (before 6.15)")
    assert watch.ended == {victim: -9}
    assert watch.oom_kills in (0, None)


def test_a_handle_of_something_else(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        assert exit_status(file.fileno()) is None
