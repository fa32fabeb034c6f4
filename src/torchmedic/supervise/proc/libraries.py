"""Whether a process has loaded one of the compilers of the CUDA driver, by the files that it has mapped."""

from __future__ import annotations

from pathlib import Path

from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc.process import PROC

_COMPILERS = ("libnvidia-ptxjitcompiler", "libnvrtc.", "libnvJitLink")


def compilers(pid: int, *, proc: Path = PROC) -> tuple[str, ...]:
    """Those that are mapped, by their names."""
    maps = text(f"{proc}/{pid}/maps") or ""
    return tuple(name.rstrip(".") for name in _COMPILERS if f"/{name}" in maps)
