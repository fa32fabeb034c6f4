"""What stands between a process and a GPU, read from recorded files; which code runs on which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.diagnose.rules.devices.cuda_not_available import _reason
from torchmedic.diagnose.rules.devices.no_kernel_for_gpu import covers
from torchmedic.evidence.devices.cuda_setup import CudaSetup, read_setup

VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder@U16)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OLD_VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021\n"
MAPS = "7f00-7f01 r-xp 00000000 08:01 131 /usr/lib/x86_64-linux-gnu/libcuda.so.570.86.10\n"


def machine(root: Path, *, version: str = VERSION, cards: int = 2, maps: str = "") -> Path:
    for folder in ("proc/driver/nvidia", "proc/self", "dev"):
        (root / folder).mkdir(parents=True)
    if version:
        (root / "proc/driver/nvidia/version").write_text(version)
    (root / "proc/self/maps").write_text(maps)
    for name in ["nvidiactl", "nvidia-uvm", "null", *(f"nvidia{number}" for number in range(cards))]:
        (root / "dev" / name).touch()
    return root


@pytest.mark.parametrize(("version", "driver"), [(VERSION, "570.124.06"), (OLD_VERSION, "470.82.01"), ("", None)])
def test_the_driver(tmp_path: Path, version: str, driver: str | None) -> None:
    assert read_setup(machine(tmp_path, version=version), {}).driver == driver


def test_cards_and_library(tmp_path: Path) -> None:
    found = read_setup(machine(tmp_path, maps=MAPS), {"CUDA_VISIBLE_DEVICES": "1"})

    assert (found.cards, found.library, found.visible, found.hidden) == (2, "570.86.10", "1", False)


def test_a_machine_without_anything(tmp_path: Path) -> None:
    found = read_setup(tmp_path, {})

    assert (found.driver, found.library, found.cards, found.visible) == (None, None, 0, None)


@pytest.mark.parametrize(
    ("visible", "hidden"),
    [("", True), ("-1", True), ("2", True), ("0", False), ("1,7", False), ("GPU-4f", False), (None, False)],
)
def test_what_hides_every_card(visible: str | None, hidden: bool) -> None:
    assert setup(visible=visible).hidden is hidden


def setup(
    build: str | None = "12.8", driver: str | None = "570.1", cards: int = 2, visible: str | None = None
) -> CudaSetup:
    return CudaSetup(torch="2.11", build=build, driver=driver, library=None, cards=cards, visible=visible)


def test_the_facts_decide_which_reason_it_is() -> None:
    assert "CPU only" in _reason(setup(build=None))
    assert "hides every GPU" in _reason(setup(visible=""))
    assert "no NVIDIA driver" in _reason(setup(driver=None, cards=0))
    assert "shows no GPU" in _reason(setup(cards=0))
    assert _reason(setup()) == ""


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_80", "sm_86"], (8, 9), True),
        (["sm_80", "sm_86"], (9, 0), False),
        (["sm_80", "compute_86"], (9, 0), True),
        (["sm_75", "sm_90"], (6, 1), False),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90a", "compute_90a"], (10, 0), False),
        (["sm_100", "sm_120"], (12, 0), True),
        (["gfx90a"], (9, 0), False),
    ],
)
def test_which_code_runs_on_which_gpu(archs: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert covers(archs, capability) is runs
