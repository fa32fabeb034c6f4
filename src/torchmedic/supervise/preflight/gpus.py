"""Checks of torch and the GPUs: whether torch can be imported, and the health, speed, free memory and use of GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torchmedic.detect.failures.architectures import covers, covers_without_compiling
from torchmedic.diagnose.words.format import size
from torchmedic.records.gpu import GpuState
from torchmedic.supervise.gpu.nvml import SERIOUS_REASONS
from torchmedic.supervise.preflight.cards import EXCLUSIVE, PROHIBITED, Card, Cards
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn
from torchmedic.supervise.preflight.questions import TorchFacts

_MAX_IDLE_SHARE = 0.05  # share of a GPU's memory, and
_MAX_IDLE_BYTES = 1 << 30  # the driver and idle contexts hold less
_DESKTOP_BYTES = 1 << 30  # that a desktop needs
_HIDDEN = ("", "-1", "none", "NoDevFiles")


def check(situation: Situation) -> Iterator[Finding]:
    if situation.torch is not None:
        yield _torch(situation.torch)
    cards = situation.cards
    if cards is None:
        yield fail(
            "GPU",
            "the NVIDIA driver did not answer in time: everything that uses CUDA would wait as well",
            "`nvidia-smi` hangs too; see `dmesg` for Xid errors, and restart the machine",
        )
        return
    if cards.error:
        yield fail(
            "GPU", f"the NVIDIA driver does not work: {cards.error}", "restart the machine, or reinstall the driver"
        )
        return
    if cards.health is None or not cards.health.gpus:
        yield ok("GPU", "no NVIDIA GPU: skipped")
        return
    shown = situation.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.split(",")[0].strip() in _HIDDEN:
        yield ok("GPU", f"hidden by CUDA_VISIBLE_DEVICES={shown}: skipped")
        return
    yield _driver(situation, cards)
    visible = [gpu for gpu in cards.health.gpus if gpu.ordinal is not None] or cards.health.gpus
    by_index = {card.index: card for card in cards.cards}
    for gpu in visible:
        yield from _gpu(gpu, by_index.get(gpu.index, Card(index=gpu.index)), situation)


def _torch(torch: TorchFacts) -> Finding:
    if "did not end" in torch.error:
        return warn("torch", torch.error, "is it on a network file system that is slow or does not answer?")
    if torch.error:
        missing = "No module named 'torch'" in torch.error
        return fail("torch", torch.error, "install torch into the environment of torchmedic" if missing else "")
    return ok("torch", f"{torch.version}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'built without CUDA'}")


def _driver(situation: Situation, cards: Cards) -> Finding:
    """Whether torch can use the GPUs that NVML lists. Torch was asked in a separate process."""
    assert cards.health is not None
    driver = f"driver {cards.health.driver}"
    if cards.cuda:
        driver += f" (CUDA {cards.cuda // 1000}.{cards.cuda % 1000 // 10})"
    torch = situation.torch
    if torch is None or torch.error:
        return ok("GPU driver", driver)
    if torch.cuda is None:
        return warn(
            "GPU driver",
            f"torch {torch.version} is built without CUDA: the GPUs are not used",
            "install a build for CUDA",
        )
    build = f"torch {torch.version} is built for CUDA {torch.cuda}"
    if torch.available:
        return ok("GPU driver", f"{driver}; {build}")
    shown = situation.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and (not torch.why or "No CUDA GPUs" in torch.why):
        return warn(
            "GPU driver",
            f"CUDA_VISIBLE_DEVICES={shown} names no GPU of this host: CUDA sees none",
            "correct or unset it",
        )
    why = f": {torch.why}" if torch.why else ""
    return fail(
        "GPU driver",
        f"{build} and cannot use {driver}{why}",
        "update the driver, or install a build of torch for an older CUDA",
    )


def _gpu(gpu: GpuState, card: Card, situation: Situation) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    found = [
        finding
        for finding in (
            _health(name, gpu),
            _architecture(name, gpu, card, situation),
            _mode(name, gpu, card),
            _throttling(name, gpu),
            _others(name, gpu, card),
            _display(name, gpu, card, situation),
        )
        if finding is not None
    ]
    yield from found
    if not found:
        heat = f", {gpu.temperature} C" if gpu.temperature is not None else ""
        room = ""
        if gpu.memory_total is not None and gpu.memory_used is not None:
            room = f", {size(gpu.memory_total - gpu.memory_used)} of {size(gpu.memory_total)} free"
        slow = ", persistence mode off: the first use takes seconds longer" if card.persistence is False else ""
        yield ok(name, f"{gpu.name or 'healthy'}{room}{heat}{slow}")


def _health(name: str, gpu: GpuState) -> Finding | None:
    if gpu.lost:
        return fail(name, f"{gpu.name}: {gpu.lost}", "reset it (`nvidia-smi -r`) or restart the machine")
    if gpu.remap_failed:
        return warn(name, f"{gpu.name}: bad memory could not be mapped out", "have it replaced")
    if gpu.remap_pending:
        return warn(
            name, f"{gpu.name}: bad memory waits to be mapped out", "reset it (`nvidia-smi -r`) or restart the machine"
        )
    if gpu.ecc_uncorrected:
        return warn(
            name,
            f"{gpu.name}: {gpu.ecc_uncorrected} uncorrectable memory errors since the driver was loaded",
            "reset it; if they come back, have it replaced",
        )
    return None


def _architecture(name: str, gpu: GpuState, card: Card, situation: Situation) -> Finding | None:
    torch = situation.torch
    if torch is None or card.capability is None or not torch.archs or not all("_" in arch for arch in torch.archs):
        return None
    arch = f"sm_{card.capability[0]}{card.capability[1]}"
    if not covers(torch.archs, card.capability):
        return fail(
            name,
            f"{gpu.name} is {arch}, and torch {torch.version} holds no code for it ({', '.join(torch.archs)})",
            f"install a build of torch that was compiled for {arch}",
        )
    if not covers_without_compiling(torch.archs, card.capability):
        return warn(
            name,
            f"{gpu.name} is {arch}, for which the driver must compile torch's kernels: minutes in the first run",
            f"install a build of torch that was compiled for {arch}",
        )
    return None


def _mode(name: str, gpu: GpuState, card: Card) -> Finding | None:
    if card.compute_mode == PROHIBITED:
        return fail(name, f"{gpu.name}: its compute mode forbids CUDA", f"nvidia-smi -i {gpu.index} -c DEFAULT")
    if card.compute_mode == EXCLUSIVE and card.processes:
        owner = card.processes[0][0]
        return fail(
            name, f"{gpu.name} is in exclusive mode, and process {owner} uses it", f"wait for {owner}, or end it"
        )
    return None


def _throttling(name: str, gpu: GpuState) -> Finding | None:
    slowed = [reason for reason in gpu.throttle if reason in SERIOUS_REASONS]
    if not slowed:
        return None
    heat = f" at {gpu.temperature} C" if gpu.temperature is not None else ""
    return warn(
        name, f"{gpu.name} is slowed down now: {', '.join(slowed)}{heat}", "check its cooling and its power supply"
    )


def _others(name: str, gpu: GpuState, card: Card) -> Finding | None:
    if gpu.memory_used is None or not gpu.memory_total or card.display:
        return None
    if gpu.memory_used <= max(_MAX_IDLE_SHARE * gpu.memory_total, _MAX_IDLE_BYTES):
        return None
    pids = [pid for pid, _ in card.processes if pid != os.getpid()]
    who = (
        f"{len(pids)} other process{'es' if len(pids) != 1 else ''} ({', '.join(map(str, pids[:4]))})"
        if pids
        else "others"
    )
    return warn(
        name,
        f"{gpu.name}: {who} hold {size(gpu.memory_used)} of {size(gpu.memory_total)}",
        "choose another card with CUDA_VISIBLE_DEVICES, or end them",
    )


def _display(name: str, gpu: GpuState, card: Card, situation: Situation) -> Finding | None:
    if not card.display or gpu.memory_total is None or gpu.memory_used is None:
        return None
    if situation.script is not None and situation.script.memory_fraction:
        return None
    fraction = max(0.1, (gpu.memory_total - gpu.memory_used - _DESKTOP_BYTES) / gpu.memory_total)
    return warn(
        name,
        f"{gpu.name} drives the display ({size(gpu.memory_used)} of {size(gpu.memory_total)} in use), and a run that "
        "takes all of the rest freezes the desktop",
        f"torch.cuda.set_per_process_memory_fraction({int(fraction * 100) / 100})",
    )
