"""What the driver says is wrong with a GPU, in words; a healthy GPU gives no facts."""

from __future__ import annotations

from torchmedic.records.gpu import GpuHealth, GpuState


def health_facts(health: GpuHealth | None) -> list[str]:
    """Evidence for a diagnosis: only what is out of the ordinary, and of no card that the run does not see."""
    gpus = health.gpus if health is not None else ()
    return [fact for gpu in gpus if gpu.ordinal is not None for fact in _facts(gpu)]


def _facts(gpu: GpuState) -> list[str]:
    name = f"{gpu.name or 'the GPU'} {gpu.index}"
    facts = [f"{name} no longer answers: {gpu.lost}"] if gpu.lost else []
    facts += [f"the driver reported Xid {xid.code} for {name}" for xid in gpu.xids[:4]]
    if gpu.ecc_new:
        facts.append(f"{name} had {gpu.ecc_new} memory errors during the run that could not be corrected")
    if gpu.remap_failed or gpu.remap_pending:
        facts.append(
            f"{name} has bad rows of memory that {'could not be' if gpu.remap_failed else 'wait to be'} remapped"
        )
    hot = gpu.temperature is not None and gpu.slowdown_temperature is not None
    if hot and gpu.temperature >= gpu.slowdown_temperature:  # type: ignore[operator]
        facts.append(f"{name} is at {gpu.temperature} C and slows down from {gpu.slowdown_temperature} C on")
    return facts
