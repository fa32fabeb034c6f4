"""Cards by name: memory, speed, and what CUDA takes before the first tensor. Sizes as text (`24GiB`)."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchmedic.errors import UsageError

MIB, GIB = 1 << 20, 1 << 30
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B?)")

# What PyTorch gives to cuBLAS for each thread that multiplies matrices, in bytes. The default of cuBLAS is
# `:4096:2:16:8` (KiB times count, twice); PyTorch asks for 32 MiB on Hopper.
_UNLIMITED = 1 << 60  # bytes
_CUBLAS_DEFAULT = (4096 * 2 + 16 * 8) << 10
_CUBLAS_HOPPER = 32 * MIB


class Card(NamedTuple):
    """A card as its data sheet describes it; speeds without sparsity.

    Attributes:
        memory: Bytes that CUDA reports as the total.
        capability: Compute capability.
        half_flops: Multiply-adds of bfloat16 and float16 on tensor cores, as operations per second.
        float_flops: Operations per second in float32, without TF32.
        bandwidth: Bytes per second to and from the memory of the card.
        host_bandwidth: Bytes per second to and from pinned memory of the host.
        context: Bytes that the CUDA context and the loaded libraries take.
        processors: Streaming multiprocessors.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    half_flops: float
    float_flops: float
    bandwidth: float
    host_bandwidth: float
    context: int
    processors: int

    @property
    def threads_per_processor(self) -> int:
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 9), (12, 0)) else 2048

    @property
    def cublas_workspace(self) -> int:
        return _CUBLAS_HOPPER if self.capability[0] == 9 else _CUBLAS_DEFAULT


def _card(
    name: str,
    gib: float,
    capability: tuple[int, int],
    half: float,
    single: float,
    gbs: int,
    host: int,
    context: int,
    processors: int,
) -> Card:
    speeds = (half * 1e12, single * 1e12, gbs * 1e9, host * 1e9)
    return Card(name, int(gib * GIB), capability, *speeds, context * MIB, processors)


# Data sheets of the vendor; `memory` is what CUDA reports. The context of the H200 was measured (767 MiB with torch
# 2.11, CUDA 13); the others are estimates from it and from reports of users.
CARDS = (
    _card("H200", 139.8, (9, 0), 989, 67, 4800, 50, 767, 132),
    _card("H100", 79.2, (9, 0), 989, 67, 3350, 50, 767, 132),
    _card("A100-80GB", 79.2, (8, 0), 312, 19.5, 2039, 25, 500, 108),
    _card("A100-40GB", 39.4, (8, 0), 312, 19.5, 1555, 25, 500, 108),
    _card("B200", 178.4, (10, 0), 2250, 80, 8000, 50, 800, 148),
    _card("L40S", 44.4, (8, 9), 362, 91.6, 864, 25, 500, 142),
    _card("L4", 22.2, (8, 9), 121, 30.3, 300, 25, 450, 58),
    _card("A10", 22.1, (8, 6), 125, 31.2, 600, 25, 450, 72),
    _card("T4", 14.6, (7, 5), 65, 8.1, 300, 12, 400, 40),
    _card("V100-32GB", 31.7, (7, 0), 125, 15.7, 900, 12, 450, 80),
    _card("V100-16GB", 15.8, (7, 0), 125, 15.7, 900, 12, 450, 80),
    _card("RTX-5090", 31.4, (12, 0), 210, 105, 1792, 50, 550, 170),
    _card("RTX-4090", 23.6, (8, 9), 165, 82.6, 1008, 25, 450, 128),
    _card("RTX-3090", 23.7, (8, 6), 71, 35.6, 936, 25, 450, 82),
    _card("RTX-4080", 15.7, (8, 9), 97, 48.7, 717, 25, 450, 76),
    _card("RTX-3060", 11.8, (8, 6), 25, 12.7, 360, 25, 400, 28),
)
DEFAULT = CARDS[0]  # whose speed and workspaces count where no card is named


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: `24GiB`, `24G` and `24 gib` are the same, `24GB` is decimal.

    Raises:
        UsageError: The text is not a size.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"not a size: {text!r} (write it like 24GiB)")
    number, unit, rest = float(found[1]), found[2], found[3]
    factor = _DECIMAL.get(unit + rest) or _UNITS[unit]
    return int(number * factor)


def size_text(nbytes: float) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(nbytes) >= 1 << power:
            return f"{nbytes / (1 << power):.2f} {unit}"
    return f"{int(nbytes)} B"


def find_card(name: str) -> Card:
    """The card that a name means: `H200`, `NVIDIA H200`, `a100-80gb`, `rtx 4090`.

    Raises:
        UsageError: No such card, or several.
    """
    wanted = _plain(name)
    exact = [card for card in CARDS if _plain(card.name) == wanted]
    several = exact or [card for card in CARDS if wanted and _plain(card.name).startswith(wanted)]
    if len(several) == 1:
        return several[0]
    known = ", ".join(card.name for card in several or CARDS)
    why = "several cards have this name" if several else "no such card in the table"
    raise UsageError(f"{why}: {name!r} (one of {known}; or give --memory)")


def chosen_card(name: str, memory: int | None) -> tuple[Card, bool]:
    """The card of a name or with some memory, else the default card without a limit; and whether it has a limit."""
    if name:
        card = find_card(name)
        return (card if memory is None else card._replace(memory=memory)), True
    if memory is not None:
        return DEFAULT._replace(name=f"a card with {size_text(memory)}", memory=memory), True
    return DEFAULT._replace(memory=_UNLIMITED), False


def _plain(name: str) -> str:
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    for prefix in ("nvidia", "tesla", "geforce"):
        text = text.removeprefix(prefix)
    return text
