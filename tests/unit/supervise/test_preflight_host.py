"""What `torchmedic preflight` sees in hosts and cards, as files and NVML tell of them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from preflights import GIB, HOST, LOADER, TORCH, problems, situation

from torchmedic.records.gpu import GpuHealth, GpuState
from torchmedic.records.host import HostPressure, Psi
from torchmedic.supervise.preflight import disks, gpus, limits, memory, processors
from torchmedic.supervise.preflight.cards import Card, Cards
from torchmedic.supervise.preflight.finding import Situation
from torchmedic.supervise.preflight.questions import TorchFacts

PTX = TorchFacts(version="2", cuda="12", available=True, archs=("sm_80", "compute_90"))


def test_processors(tmp_path: Path) -> None:
    assert problems(processors.check(situation())) == {}
    assert problems(processors.check(situation(OMP_THREAD_LIMIT="8"))) == {}
    assert problems(processors.check(situation(OMP_THREAD_LIMIT="nonsense"))) == {}
    tight = HostPressure(time=0.0, cpus=8, cpu_quota=2.5, periods=1000, throttled_periods=300)
    found = problems(processors.check(situation(LOADER + "DataLoader(d, num_workers=4)", tmp_path, tight)))
    assert found == {
        "CPU": "warn: torch will use 8 threads and there are 8 CPUs, a quota of 2.5: they wait for each other",
        "CPU throttling": "warn: 30% of 1000 periods so far were cut short by the quota of 2.5",
        "DataLoader workers": f"warn: {tmp_path}/train.py:3 starts 4 workers on 8 CPUs with a quota of 2.5",
    }
    # The script itself may ask for fewer.
    assert "CPU" not in problems(processors.check(situation("torch.set_num_threads(2)", tmp_path, tight)))


def test_memory(tmp_path: Path) -> None:
    assert problems(memory.check(situation())) == {}
    docker = HostPressure(time=0.0, shm_size=64 << 20, shm_free=64 << 20, memory_available=GIB)
    assert list(problems(memory.check(situation(pressure=docker)))) == ["shared memory"]
    source = (
        "N = 1000\ndata = TensorDataset(torch.randn(N, 3, 256, 256), torch.randint(0, 9, (N,)))\n"
        "DataLoader(data, batch_size={batch}, num_workers=4)"
    )
    found = problems(memory.check(situation(LOADER + source.format(batch=256), tmp_path, docker)))
    assert found["shared memory"].startswith("fail")
    assert "a single batch" in found["shared memory"]
    assert "takes 192.0 MiB" in found["shared memory"]
    found = problems(memory.check(situation(LOADER + source.format(batch=16), tmp_path, docker)))
    assert "4 workers x 2 batches of 12.0 MiB" in found["shared memory"]
    assert found["shared memory"].startswith("warn")
    assert problems(memory.check(situation(LOADER + source.format(batch=256), tmp_path))) == {}

    full = HostPressure(
        time=0.0, memory_available=64 * GIB, memory_limit=4 * GIB, memory_current=4 * GIB - 1024, memory=Psi(full=25.0)
    )
    found = problems(memory.check(situation(pressure=full)))
    assert found["memory"] == "warn: 1.0 KiB free in the control group, whose limit is 4.0 GiB"
    assert "25 % of the last 10 s" in found["memory pressure"]
    (tmp_path / "overcommit").write_text("2\n")
    forks = situation(LOADER + "DataLoader(d, num_workers=2)", tmp_path)
    assert "overcommit" in problems(memory.check(forks, tmp_path / "overcommit"))


def test_limits(tmp_path: Path) -> None:
    low = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_AS: GIB, resource.RLIMIT_STACK: 1 << 20, resource.RLIMIT_CORE: 0}
    found = problems(limits.check(situation(), lambda which: (low.get(which, -1), -1)))
    assert list(found) == ["open files", "address space", "stack"]
    assert found["address space"].startswith("warn: the limit is 1.0 GiB")
    none = HostPressure(time=0.0, pids_limit=100, pids_current=99)
    assert problems(limits.check(situation(pressure=none), lambda _: (-1, -1)))["processes"].startswith("fail: 1 more")
    few = HostPressure(time=0.0, pids_limit=100, pids_current=60)
    wants = situation(LOADER + "DataLoader(d, num_workers=8)", tmp_path, few)
    assert "40 more" in problems(limits.check(wants, lambda _: (-1, -1)))["processes"]


def test_folders(tmp_path: Path) -> None:
    def found(**changed: object) -> dict[str, str]:
        values = {"free": 50 * GIB, "inodes": 1000, "read_only": False, "writable": True, "kind": "ext4", **changed}
        return problems(disks.check(situation(), lambda path: disks.Folder(**values)))  # type: ignore[arg-type]

    assert found() == {}
    assert found(free=GIB)["working folder"] == "warn: 1.0 GiB free, little for checkpoints"
    assert found(free=0)["working folder"].startswith("fail")
    assert found(inodes=0)["working folder"].startswith("fail")
    assert found(inodes=-1) == {}
    assert "read-only" in found(read_only=True)["working folder"]
    assert "may not be written" in found(writable=False)["working folder"]
    assert list(found(kind="nfs4", options="rw,hard")) == ["working folder", "temporary folder"]
    assert list(found(kind="nfs4", options="rw,soft,timeo=10")) == ["temporary folder"]
    assert "hangs" in problems(disks.check(situation(), lambda path: f"{path} hangs"))["working folder"]

    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw\n"
        f"2 1 0:5 / {tmp_path} rw,hard - nfs4 server:/x rw,vers=4\nnonsense\n"
    )
    (tmp_path / "below").mkdir()
    assert disks.read_folder(str(tmp_path / "below"), mounts).kind == "nfs4"
    assert disks.read_folder(str(tmp_path.parent), mounts).kind == "ext4"


def gpu(**known: object) -> GpuState:
    values = {"index": 0, "name": "H200", "ordinal": 0, "memory_used": GIB, "memory_total": 140 * GIB, **known}
    return GpuState(**values)  # type: ignore[arg-type]


def cards(state: GpuState, **known: object) -> Cards:
    card = Card(**{"index": 0, "capability": (9, 0), "persistence": True, **known})  # type: ignore[arg-type]
    return Cards(health=GpuHealth(time=0.0, driver="570.1", gpus=(state,)), cards=(card,), cuda=12080)


@pytest.mark.parametrize(
    ("found", "torch", "says"),
    [
        (cards(gpu()), TORCH, ""),
        (cards(gpu(ecc_uncorrected=0, throttle=("idle", "power cap"))), TORCH, ""),
        (cards(gpu(), compute_mode=3), TORCH, ""),
        (cards(gpu(lost="GPU is lost")), TORCH, "fail: H200: GPU is lost"),
        (cards(gpu(remap_pending=True)), TORCH, "warn: H200: bad memory waits"),
        (cards(gpu(ecc_uncorrected=3)), TORCH, "warn: H200: 3 uncorrectable"),
        (cards(gpu(throttle=("hardware thermal slowdown",), temperature=91)), TORCH, "slowdown at 91 C"),
        (cards(gpu(memory_used=70 * GIB), processes=((4711, None),)), TORCH, "1 other process (4711) hold 70.0 GiB"),
        (cards(gpu(memory_used=70 * GIB)), TORCH, "others hold 70.0 GiB of 140.0 GiB"),
        (cards(gpu(), compute_mode=2), TORCH, "fail: H200: its compute mode forbids CUDA"),
        (cards(gpu(), compute_mode=3, processes=((5, GIB),)), TORCH, "fail: H200 is in exclusive mode, and process 5"),
        (cards(gpu(), capability=(12, 0)), TORCH, "fail: H200 is sm_120, and torch 2.11 holds no code for it"),
        (cards(gpu(), capability=(10, 3)), PTX,
         "warn: H200 is sm_103, for which the driver must compile"),
        (cards(gpu(memory_used=2 * GIB, memory_total=8 * GIB), display=True), TORCH, "drives the display (2.0 GiB of"),
    ],
)  # fmt: skip
def test_cards(found: Cards, torch: TorchFacts, says: str) -> None:
    told = problems(gpus.check(situation(cards=found, torch=torch)))
    if says:
        assert list(told) == ["GPU 0"]
        assert says in told["GPU 0"]
    else:
        assert told == {}


def test_what_torch_makes_of_the_cards(tmp_path: Path) -> None:
    old = TorchFacts(version="2.13", cuda="13.0", available=False, why="The NVIDIA driver on your system is too old")
    told = problems(gpus.check(situation(cards=cards(gpu()), torch=old)))
    assert told["GPU driver"].startswith(
        "fail: torch 2.13 is built for CUDA 13.0 and cannot use driver 570.1 (CUDA 12.8)"
    )
    hidden = cards(gpu(ordinal=None))
    none = TorchFacts(version="2.13", cuda="13.0", available=False, why="No CUDA GPUs are available")
    told = problems(gpus.check(situation(cards=hidden, torch=none, CUDA_VISIBLE_DEVICES="7")))
    assert told["GPU driver"].startswith("warn: CUDA_VISIBLE_DEVICES=7 names no GPU")
    assert problems(gpus.check(situation(cards=hidden, torch=old, CUDA_VISIBLE_DEVICES=""))) == {}
    cpu = TorchFacts(version="2.13+cpu")
    assert problems(gpus.check(situation(cards=cards(gpu()), torch=cpu)))["GPU driver"].startswith("warn")
    broken = situation(cards=Cards(error="Driver/library version mismatch"))
    assert problems(gpus.check(broken))["GPU"].startswith("fail")
    silent = Situation(environ={}, pressure=HOST, cards=None)
    assert "did not answer" in problems(gpus.check(silent))["GPU"]
    # A script that leaves the desktop some memory by itself.
    shown = cards(gpu(), display=True)
    assert (
        problems(gpus.check(situation("torch.cuda.set_per_process_memory_fraction(0.8)", tmp_path, cards=shown))) == {}
    )
    assert problems(gpus.check(situation(torch=TorchFacts(error="torch cannot be imported: No module")))) == {
        "torch": "fail: torch cannot be imported: No module"
    }
