"""What the host and the control groups leave a run, read from trees of files that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from torchmedic.records.host import HostPressure, Psi
from torchmedic.supervise.host import cgroups, host_pressure

PSI = "some avg10=1.50 avg60=0.00 avg300=0.00 total=100000\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=40000\n"


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    _write(proc / "pressure", cpu=PSI, memory=PSI, io=PSI)
    _write(proc, vmstat="pswpin_x 9\npswpin 10\npswpout 20\npgmajfault 300\n")
    _write(proc, meminfo="MemTotal:       1000 kB\nMemAvailable:    400 kB\nSwapTotal:  50 kB\nSwapFree:  30 kB\n")
    _write(proc / "7", status="Name:\tpython\nCpus_allowed_list:\t0-2,5\n", cgroup="0::/slice/job\n")
    fields = [str(number) for number in range(3, 53)]
    fields[9] = "77"  # majflt, the 12th of all
    _write(proc / "7", stat=f"7 (a) b (c) {' '.join(fields)}\n")
    return proc


def test_version_2(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "groups"
    _write(root / "slice", cpu__max="150000 100000\n", memory__max="max\n", pids__max="100\n", pids__current="42\n")
    _write(root / "slice", cpu__stat="usage_usec 5\nnr_periods 40\nnr_throttled 10\nthrottled_usec 2500000\n")
    job = {"cpu__max": "max 100000\n", "memory__max": "5000\n", "memory__high": "4000\n", "memory__current": "3000\n"}
    _write(root / "slice" / "job", **job, memory__events="low 0\nhigh 6\n", pids__max="max\n", memory__pressure=PSI)
    _write(root / "slice" / "job", cpu__stat="usage_usec 5\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    found = host_pressure.read(7, [7, 8], proc=proc, groups=root, shm=tmp_path)
    shm = os.statvfs(tmp_path)
    assert found == HostPressure(
        time=found.time,
        cpu=(stall := Psi(full=0.25, some_total=100000, full_total=40000)),
        memory=stall,
        io=stall,
        group_memory=stall,
        cpus=4,
        cpu_quota=1.5,  # the group around it is the one with a quota, so its counters are those that count
        periods=40,
        throttled_periods=10,
        memory_current=3000,
        memory_limit=5000,
        memory_high=4000,
        memory_total=1000 * 1024,
        memory_available=400 * 1024,
        swap_total=50 * 1024,
        swap_free=30 * 1024,
        swap_in=10 * os.sysconf("SC_PAGE_SIZE"),
        major_faults={7: 77},
        shm_size=shm.f_blocks * shm.f_frsize,
        shm_free=found.shm_free,
        pids_limit=100,
        pids_current=42,
    )


def test_version_1_beside_version_2(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "groups"
    (proc / "7" / "cgroup").write_text(
        "9:cpu,cpuacct:/docker/a\n8:pids:/\n4:memory:/docker/a\n1:name=systemd:/\n0::/d\n"
    )
    _write(root / "cpu,cpuacct" / "docker" / "a", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    _write(root / "cpu,cpuacct" / "docker" / "a", cpu__stat="nr_periods 4\nnr_throttled 3\nthrottled_time 1500000000\n")
    _write(root / "memory" / "docker" / "a", memory__limit_in_bytes="9223372036854771712\n")
    _write(root / "memory" / "docker", memory__limit_in_bytes="8000\n", memory__usage_in_bytes="100\n")
    _write(root / "pids", pids__current="3\n")
    _write(root / "unified" / "d", cpu__pressure=PSI)
    found = host_pressure.read(7, proc=proc, groups=root, shm=tmp_path / "none")
    assert (found.cpu_quota, found.periods, found.throttled_periods) == (0.5, 4, 3)
    assert (found.memory_limit, found.memory_current, found.memory_high) == (8000, 100, None)
    assert found.group_cpu is not None
    assert found.group_cpu.some_total == 100000
    assert (found.pids_limit, found.shm_size, found.major_faults) == (None, None, {})


def test_nothing_can_be_read(tmp_path: Path) -> None:
    found = host_pressure.read(7, [7], proc=tmp_path / "no", groups=tmp_path / "no", shm=tmp_path / "no")
    assert found == HostPressure(time=found.time)
    assert msgspec.structs.asdict(host_pressure.difference(found, found)).keys() >= {"seconds", "swap_in"}
    assert [
        value for name, value in msgspec.structs.asdict(host_pressure.difference(found, found)).items() if value
    ] == [pytest.approx(1e-6)]


def test_damaged_files(tmp_path: Path, proc: Path) -> None:
    _write(proc / "pressure", cpu="some avg10=x total=1\n", memory="", io="\n\n")
    _write(proc / "7", status="Cpus_allowed_list:\t0-\n", stat="7 (x) S 1\n", cgroup="nonsense\n0::/../../host\n")
    _write(tmp_path / "groups", cpu__max="x y\n", memory__max="5 5\n", cpu__stat="nr_periods\nnr_throttled many\n")
    found = host_pressure.read(7, [7], proc=proc, groups=tmp_path / "groups", shm=tmp_path)
    assert (found.cpu, found.memory, found.io, found.cpu_quota, found.memory_limit) == (None,) * 5
    assert (found.major_faults, found.periods, found.throttled_periods) == ({}, None, None)


def test_rates() -> None:
    before = HostPressure(
        time=10.0,
        cpu=Psi(full=0, some_total=1_000_000),
        memory=Psi(full=0, some_total=1_000_000, full_total=0),
        periods=100,
        throttled_periods=10,
        swap_in=4096,
        major_faults={1: 10, 2: 20},
    )
    after = HostPressure(
        time=14.0,
        cpu=Psi(full=0, some_total=3_000_000),
        memory=Psi(full=0, some_total=3_000_000, full_total=1_000_000),
        periods=140,
        throttled_periods=40,
        swap_in=4096 * 5,
        major_faults={1: 30, 3: 900},
    )
    rates = host_pressure.difference(before, after)
    assert (rates.cpu_some, rates.memory_full, rates.io_full) == (0.5, 0.25, None)
    assert (rates.throttled_periods, rates.swap_in, rates.major_faults) == (0.75, 4096, 5)
    assert host_pressure.difference(before, before).throttled_periods is None


def test_this_machine() -> None:
    found = host_pressure.read(pids=[os.getpid()])
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory_total
    assert found.major_faults.keys() == {os.getpid()}
    assert cgroups.text(Path("/proc/self/mem")) is None  # readable by nobody at 0
