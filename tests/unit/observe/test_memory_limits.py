"""Which limit refused an allocation, where it comes from, what is left in /dev/shm, and whose memory words speak of."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path

import msgspec
import pytest

from torchmedic.detect.failures.exhaustion import exhaustion_of
from torchmedic.diagnose.rules.memory.shared_memory_full import shared_memory
from torchmedic.observe.memory import headroom
from torchmedic.observe.memory.host import HostMemory, free_bytes, host_memory
from torchmedic.observe.memory.last_numbers import NoRoom
from torchmedic.observe.memory.limits import Setter, mappings, refusing, setter_of
from torchmedic.observe.memory.usage import resident_bytes
from torchmedic.records import Diagnosis
from torchmedic.supervise import memory_warnings

GIB = 1 << 30
ROOMY = HostMemory(
    resident=GIB, address_space=3 * GIB, address_peak=int(3.5 * GIB), data=2 * GIB, total=64 * GIB, available=60 * GIB
)


def limited(**limits: int) -> HostMemory:
    return msgspec.structs.replace(ROOMY, **limits)


@pytest.mark.parametrize(
    ("memory", "asked", "expected"),
    [
        (ROOMY, GIB, None),
        (limited(address_limit=5 * GIB), GIB, None),  # it would have fitted
        (limited(address_limit=4 * GIB), 2 * GIB, ("RLIMIT_AS", 3 * GIB, True)),
        (limited(address_limit=4 * GIB), GIB * 3 // 4, ("RLIMIT_AS", int(3.5 * GIB), True)),  # at its peak it did not
        (limited(data_limit=3 * GIB), 2 * GIB, ("RLIMIT_DATA", 2 * GIB, True)),
        (limited(address_limit=4 * GIB, data_limit=2 * GIB + 1), 2 * GIB, ("RLIMIT_DATA", 2 * GIB, True)),
        (limited(address_limit=4 * GIB), 99 * GIB, None),  # no host of this size could have granted it
        (limited(address_limit=4 * GIB), None, ("RLIMIT_AS", 3 * GIB, False)),
        (limited(address_limit=3 * GIB + 4096), None, ("RLIMIT_AS", 3 * GIB, True)),
        (limited(address_limit=200 * GIB), None, None),  # more than there is
    ],
)
def test_the_limit_that_refused(memory: HostMemory, asked: int | None, expected: tuple[str, int, bool] | None) -> None:
    found = refusing(memory, asked)
    assert (found and (found.name, found.taken, found.certain)) == expected


def family(folder: Path, *generations: tuple[int, int, str, str]) -> Path:
    for pid, parent, name, limit in generations:
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
        (folder / str(pid) / "comm").write_text(f"{name}\n")
        (folder / str(pid) / "limits").write_text(
            f"Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max address space         {limit:20} {limit:20} bytes     \n"
        )
    return folder


def test_where_a_limit_comes_from(tmp_path: Path) -> None:
    me = os.getpid()
    proc = family(
        tmp_path,
        (me, 900001, "python", "4096"),
        (900001, 900002, "python (x)", "4096"),
        (900002, 900003, "bash", "4096"),
        (900003, 0, "sshd", "unlimited"),
    )
    assert setter_of("RLIMIT_AS", 4096, proc=proc) == Setter(own=False, name="bash", pid=900002)
    assert setter_of("RLIMIT_AS", 2048, proc=proc) == Setter(own=True)
    assert setter_of("RLIMIT_AS", 4096, first=900003, proc=proc) == Setter(own=True)
    assert setter_of("RLIMIT_AS", 4096, proc=tmp_path / "none") is None


def test_memory_in_too_many_pieces(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "max_map_count").write_text("100\n")
    (tmp_path / "self" / "maps").write_text("0-1 rw-p 0 0:0 0\n" * 99)
    assert "99 pieces" in mappings(tmp_path)
    (tmp_path / "self" / "maps").write_text("0-1 rw-p 0 0:0 0\n" * 50)
    assert mappings(tmp_path) == ""


def test_files_that_nobody_has_open_are_told_apart(tmp_path: Path) -> None:
    shm, proc = tmp_path / "shm", tmp_path / "proc"
    (proc / "7" / "fd").mkdir(parents=True)
    shm.mkdir()
    for name in ("torch_1_2_3", "torch_7_8_9", "psm_opened"):
        (shm / name).write_bytes(os.urandom(65536))
    (shm / "sem.lock").write_bytes(b"x")
    (proc / "7" / "maps").write_text(f"7f00-7f10 rw-s 00000000 00:1a 5    {shm}/torch_7_8_9\n7f20-7f30 rw-p 0 0:0 0 \n")
    (proc / "7" / "fd" / "3").symlink_to(shm / "psm_opened")
    found = shared_memory(shm, proc)
    assert found is not None
    assert (found.left_files, found.example) == (1, "torch_1_2_3")
    assert found.left >= 65536
    assert shared_memory(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "where", "beside"),
    [
        ("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)", "shared", ""),
        ("unable to write to file </torch_1_2>", "shared", ""),
        ("torch_shm_manager at bin/torch_shm_manager: ERROR: No space left on device", "shared", ""),
        (
            "NCCL error in: x.cpp:9, unhandled system error\nError while creating shared memory segment "
            "/dev/shm/nccl-A (size 9637888), error: No space left on device (28)",
            "shared",
            "",
        ),
        ("unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)", "host", ""),
        ("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)", None, ""),
        ("[Errno 28] No space left on device: 'checkpoint.pt'", None, ""),
        ("std::bad_alloc", "host", ""),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "cuda", "the driver"),
        ("CUDA driver error: out of memory", "cuda", "the driver"),
        ("Triton Error [CUDA]: out of memory", "cuda", "Triton"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda", "cuBLAS"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuda", "cuDNN"),
        ("cuFFT error: CUFFT_ALLOC_FAILED", "cuda", "a CUDA library"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", None, ""),
        ("CUDA error: device-side assert triggered", None, ""),
    ],
)
def test_whose_memory_words_speak_of(text: str, where: str | None, beside: str) -> None:
    found = exhaustion_of(frozenset({"RuntimeError"}), text)
    if where is None:
        assert found is None
    else:
        assert found is not None
        assert (found.where.split()[0], found.beside) == (where, beside)


def test_a_process_without_room_is_explained_by_its_parent(tmp_path: Path) -> None:
    word = NoRoom(
        text="DefaultCPUAllocator: can't allocate memory: you tried to allocate 819200 bytes.",
        step=7,
        memory=limited(address_limit=3 * GIB + 4096),
    )
    line = msgspec.json.encode({"kind": "no-room", **msgspec.to_builtins(word)})
    held = b'{"kind":"holders","holders":[{"name":"kept","nbytes":900000000,"items":9,"file":"train.py","line":3}]}'
    (tmp_path / "events.jsonl").write_bytes(held + b"\n" + line + b"\n")
    (found,) = memory_warnings.explained([tmp_path])
    assert (found.code, found.grade, found.step) == ("TM414", "proven", 7)
    assert found.cause_location is not None
    assert (found.cause_location.file, found.cause_location.line) == ("train.py", 3)
    assert "there is no memory for 800.0 KiB" in found.message
    (tmp_path / "diagnosis-0.json").write_bytes(msgspec.json.encode(_error()))
    assert memory_warnings.explained([tmp_path]) == []  # it has found its words after all


def _error() -> Diagnosis:
    return Diagnosis(code="TM403", name="x", severity="error", grade="proven", message="", cause="")


def test_the_room_that_is_set_aside_is_given_back() -> None:
    headroom.reserve()
    with headroom.headroom():
        assert headroom.sizes()["VmSize"] > 0
    headroom.release()
    headroom.release()
    assert headroom.has_room(1 << 20)


def test_a_copy_leaves_room_below_the_limit_of_a_cgroup(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "status").write_text("VmRSS:\t  600 kB\n")
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (groups / "job").mkdir(parents=True)
    assert free_bytes(proc, groups) == 8000 * 1024
    (groups / "job" / "memory.max").write_text(str(1000 * 1024))
    assert free_bytes(proc, groups) == 400 * 1024
    (groups / "job" / "memory.max").write_text(str(500 * 1024))
    assert free_bytes(proc, groups) == 0


def test_a_replaced_open_sees_no_reading_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", lambda file, *_, **__: opened.append(file))
    assert resident_bytes() > 0
    assert headroom.sizes()["VmRSS"] > 0
    assert host_memory().total > 0
    assert not opened
