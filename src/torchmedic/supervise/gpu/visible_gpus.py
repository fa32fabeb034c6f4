"""Maps CUDA device numbers (`cuda:0`) to NVML indices, from CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence


def visible(
    environ: Mapping[str, str], uuids: Sequence[str], names: Sequence[str], parent_of: Callable[[str], str | None]
) -> list[int] | None:
    """The NVML indices of the GPUs that CUDA shows, in CUDA's order; None if that order is unknown.

    Args:
        environ: The environment of the process.
        uuids: The UUIDs of all GPUs in NVML's order, which is the order of the PCI bus.
        names: Their models. CUDA lists the fastest first; if all models are equal, this is NVML's order.
        parent_of: Returns the UUID of the GPU that a MIG instance is a part of.
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
            break  # CUDA ignores everything after the first GPU that does not exist
        if index in found and not word.startswith("MIG-"):
            return []  # CUDA shows no GPU at all if one is named twice
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
    # A unique prefix is enough.
    alike = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)] if word.startswith("GPU-") else []
    return alike[0] if len(alike) == 1 else None
