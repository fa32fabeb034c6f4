"""Which GPU a process means by `cuda:0`: what CUDA_VISIBLE_DEVICES says, in the terms of NVML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence


def visible(
    environ: Mapping[str, str], uuids: Sequence[str], names: Sequence[str], parent_of: Callable[[str], str | None]
) -> list[int] | None:
    """NVML's indices of the GPUs that CUDA shows, in CUDA's order; None where that order cannot be known.

    Args:
        environ: The environment of the process.
        uuids: Of all GPUs, in NVML's order, which is that of the PCI bus.
        names: Their models. CUDA's own order is the fastest first, which is the same one if all are alike.
        parent_of: The UUID of the GPU that a MIG instance is a part of.
    """
    order_known = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(names)) <= 1
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(range(len(uuids))) if order_known else None
    found: list[int] = []
    words = [word.strip() for word in value.split(",")]
    if not order_known and re.match(r"\d", words[0]):
        return None
    for word in words:
        index = _index(word, uuids, parent_of)
        if index is None:
            break  # CUDA takes those before the first that does not exist
        if index in found and not word.startswith("MIG-"):
            return []  # and none at all if one is named twice
        found.append(index)
    return found


def _index(word: str, uuids: Sequence[str], parent_of: Callable[[str], str | None]) -> int | None:
    number = re.match(r"[+]?\d+", word)
    if number is not None:
        return int(number[0]) if int(number[0]) < len(uuids) else None
    if word.startswith("MIG-"):
        old = re.match(r"MIG-(GPU-[^/]+)/", word)
        whole = old[1] if old is not None else parent_of(word)
        return uuids.index(whole) if whole in uuids else None
    # A beginning is enough if there is only one such.
    alike = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)] if word.startswith("GPU-") else []
    return alike[0] if len(alike) == 1 else None
