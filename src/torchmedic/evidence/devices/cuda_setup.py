"""What stands between this process and a GPU: the build of torch, the driver, the cards, what hides them, free memory.

Read from files and variables, so that it can be had where CUDA itself cannot be started.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from torchmedic.detect.failures.exhaustion import Exhaustion
from torchmedic.observe.memory.host import text_of

LITTLE = 256 << 20  # bytes: less than the handle and workspace of cuBLAS, or a plan of cuDNN, may ask for


class CudaSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of CUDA on this machine, from torch outwards to the driver."""

    torch: str  # its version
    build: str | None  # the CUDA (or ROCm) version that torch was built for; None for a CPU build
    driver: str | None  # the version of the kernel module that is loaded
    library: str | None  # the version of the driver's library that this process has loaded
    cards: int  # that the machine shows
    visible: str | None  # CUDA_VISIBLE_DEVICES

    @property
    def hidden(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES leaves nothing to see."""
        if self.visible is None:
            return False
        first = self.visible.split(",")[0].strip()
        beyond = first.isdigit() and int(first) >= self.cards > 0
        return first in ("", "-1", "NoDevFiles", "none") or beyond

    @property
    def lacks_driver(self) -> bool:
        """Whether no part of a driver is there. CUDA says then that the driver is too old (error 35)."""
        return self.driver is None and self.library is None and not self.cards

    @property
    def words(self) -> tuple[str, ...]:
        """The facts as lines of evidence."""
        build = f"built for CUDA {self.build}" if self.build is not None else "built without CUDA"
        driver = f"NVIDIA driver {self.driver}" if self.driver is not None else "no NVIDIA driver is loaded"
        cards = f"{self.cards} GPU{'s' if self.cards != 1 else ''}"
        seen = () if self.visible is None else (f"CUDA_VISIBLE_DEVICES is {self.visible!r}",)
        return (f"torch {self.torch} is {build}", f"on this machine: {driver}, {cards}", *seen)


def read_setup(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> CudaSetup:
    """Look at the machine; `root` and `environ` are for tests."""
    environ = os.environ if environ is None else environ
    hip = getattr(torch.version, "hip", None)
    return CudaSetup(
        torch=str(torch.__version__),
        build=torch.version.cuda or (f"ROCm {hip}" if hip else None),
        driver=_driver(root),
        library=_library(root),
        cards=_cards(root),
        visible=environ.get("CUDA_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES") if hip else None),
    )


def _driver(root: Path) -> str | None:
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text_of(root / "proc/driver/nvidia/version"))
    return found[1] if found is not None else None


def _library(root: Path) -> str | None:
    found = re.search(r"/libcuda\.so\.(\d+(?:\.\d+)+)", text_of(root / "proc/self/maps"))
    return found[1] if found is not None else None


def _cards(root: Path) -> int:
    """A container is shown the device files of its own cards; the driver's list has those of the whole machine."""
    try:
        files = [each for each in (root / "dev").iterdir() if re.fullmatch(r"nvidia\d+", each.name)]
    except OSError:
        files = []
    if files:
        return len(files)
    try:
        return sum(1 for _ in (root / "proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return 0


def free_on_device(index: int | None = None) -> tuple[int, int] | None:
    """Free bytes and all bytes of a device; None where it cannot be asked."""
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)
    return None


def asked_beside(said: Exhaustion) -> Exhaustion | None:
    """Add what the device says to an exception that names no number.

    None where a library complains though there is room: it says so of other failures too. The driver means what it
    says, and what it lacked may be free again by now.
    """
    index = said.index
    if index is None and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError, AssertionError):
            index = torch.cuda.current_device()
    room = free_on_device(index)
    if room is None:
        return said if said.beside not in ("cuBLAS", "cuDNN", "a CUDA library") else None
    if room[0] > LITTLE and said.beside in ("cuBLAS", "cuDNN", "a CUDA library"):
        return None
    return msgspec.structs.replace(said, index=index, free=room[0], capacity=room[1])
