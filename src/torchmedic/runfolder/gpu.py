"""GPU facts that the parent writes to the run folder, for the dying child and for the report.

kernel[.<rank>].txt     messages of failed checks in CUDA kernels, from stderr
gpu[.<rank>].json       state of the GPUs: Xid events, ECC, throttling, temperature

The names contain the rank if every rank has its own parent.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from torchmedic import settings
from torchmedic.records import encode
from torchmedic.records.gpu import GpuHealth
from torchmedic.runfolder import reading
from torchmedic.runfolder.files import write_atomically

KERNEL_WORDS = "kernel.txt"
GPU_HEALTH = "gpu.json"


def write_kernel_words(run: Path, text: str, rank: int | None = None) -> None:
    write_atomically(_of_rank(run / KERNEL_WORDS, rank), text.encode("utf-8", "replace"))


def read_kernel_words(run: Path, rank: int | None = None) -> str:
    """The kernel messages from the parent of a rank (by default our own), or else from the common parent."""
    for path in _candidates(run / KERNEL_WORDS, rank):
        with contextlib.suppress(OSError):
            return reading.read(path, cut=True).decode("utf-8", "replace")
    return ""


def write_gpu_health(run: Path, health: GpuHealth, rank: int | None = None) -> None:
    write_atomically(_of_rank(run / GPU_HEALTH, rank), encode(health))


def read_gpu_health(run: Path, rank: int | None = None) -> GpuHealth | None:
    """The last recorded state of the GPUs; None if there is none."""
    for path in _candidates(run / GPU_HEALTH, rank):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return reading.decode(reading.read(path), GpuHealth)
    return None


def _of_rank(path: Path, rank: int | None) -> Path:
    return path if rank is None else path.with_stem(f"{path.stem}.{rank}")


def _candidates(path: Path, rank: int | None) -> tuple[Path, ...]:
    return (_of_rank(path, settings.rank() if rank is None else rank), path)
