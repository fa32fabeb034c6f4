"""Holders of memory with the lines that fill them. Few imports: who asks for it is short of memory."""

from __future__ import annotations

from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.observe.heap.walk import Held
from torchmedic.records.memory import HeldMemory
from torchmedic.source.user_variables import user_files


def with_lines(found: list[tuple[Held, int]]) -> list[HeldMemory]:
    """Holders and their bytes, each with the line that fills it."""
    holders = []
    for held, nbytes in found:
        put = next(iter(traffic(held, user_files()).puts), None)
        holders.append(
            HeldMemory(
                name=held.name,
                nbytes=nbytes,
                items=held.size if held.kind == "items" else 0,
                file=put.file if put is not None else "",
                line=put.node.lineno if put is not None else 0,
            )
        )
    return holders
