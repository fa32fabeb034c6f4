"""Hosts, cards and scripts that do not exist, for the checks of `torchmedic preflight`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.host import HostPressure, Psi
from torchmedic.supervise.preflight.cards import Cards
from torchmedic.supervise.preflight.facts import read_facts
from torchmedic.supervise.preflight.finding import Finding, Situation
from torchmedic.supervise.preflight.questions import TorchFacts

LOADER = "from torch.utils.data import DataLoader\nimport os, argparse\n"
GIB = 1 << 30
HOST = HostPressure(
    time=0.0,
    cpus=8,
    memory=Psi(full=0.0, some_total=0, full_total=0),
    memory_available=64 * GIB,
    memory_total=128 * GIB,
    swap_total=0,
    swap_free=0,
    shm_size=32 * GIB,
    shm_free=32 * GIB,
)
TORCH = TorchFacts(version="2.11", cuda="12.8", available=True, devices=1, archs=("sm_80", "sm_90"), threads=8)


def situation(
    source: str | None = None,
    folder: Path | None = None,
    pressure: HostPressure = HOST,
    torch: TorchFacts = TORCH,
    cards: Cards | None = None,
    **environ: str,
) -> Situation:
    facts = None
    if source is not None:
        assert folder is not None
        (folder / "train.py").write_text(source)
        facts = read_facts(folder / "train.py", 8)
        environ = {**environ, **facts.settings}
    return Situation(environ=environ, pressure=pressure, script=facts, torch=torch, cards=cards or Cards())


def problems(found: Iterable[Finding]) -> dict[str, str]:
    """`check: reason` of what is not ok; the status stands in front."""
    return {each.check: f"{each.status}: {each.reason}" for each in found if each.status != "ok"}
