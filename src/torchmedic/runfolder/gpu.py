"""What the parent leaves in the run folder about the GPU, for the dying child and for the report.

kernel[.<rank>].txt     what failed checks of kernels said on stderr
gpu[.<rank>].json       how the GPUs are: Xid events, ECC, throttling, temperature

With a rank where every rank has a parent of its own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from torchmedic import settings
from torchmedic.records import encode
from torchmedic.records.gpu import GpuHealth
from torchmedic.runfolder.files import write_atomically

KERNEL_WORDS = "kernel.txt"
GPU_HEALTH = "gpu.json"


def write_kernel_words(run: Path, text: str, rank: int | None = None) -> None:
    write_atomically(_of_rank(run / KERNEL_WORDS, rank), text.encode("utf-8", "replace"))


def read_kernel_words(run: Path, rank: int | None = None) -> str:
    """What the kernels said: to the parent of this rank (by default our own), or else to the one parent of all."""
    for path in _candidates(run / KERNEL_WORDS, rank):
        with contextlib.suppress(OSError):
            return path.read_text("utf-8", "replace")
    return ""


def write_gpu_health(run: Path, health: GpuHealth, rank: int | None = None) -> None:
    write_atomically(_of_rank(run / GPU_HEALTH, rank), encode(health))


def read_gpu_health(run: Path, rank: int | None = None) -> GpuHealth | None:
    """How the GPUs were when something last changed; None where there are none, or nobody could tell."""
    for path in _candidates(run / GPU_HEALTH, rank):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=GpuHealth)
    return None


def _of_rank(path: Path, rank: int | None) -> Path:
    return path if rank is None else path.with_stem(f"{path.stem}.{rank}")


def _candidates(path: Path, rank: int | None) -> tuple[Path, ...]:
    return (_of_rank(path, settings.rank() if rank is None else rank), path)
