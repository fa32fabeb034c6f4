"""Settings of PyTorch and of the optimizers, for the facts of a report: a line of kind `settings` in events.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_MAX_OPTIMIZERS = 4


def torch_settings(optimizers: Sequence[Any], autocast: Mapping[str, torch.dtype]) -> dict[str, str]:
    """What is set now, by name. Nothing here starts a device or waits for one."""
    made = [each for each in optimizers if hasattr(each, "param_groups")][:_MAX_OPTIMIZERS]  # not one under way
    found = {f"optimizer {number}" if number else "optimizer": _shown(each) for number, each in enumerate(made)}
    found["autocast"] = ", ".join(f"{kind}: {_name(dtype)}" for kind, dtype in autocast.items()) or "off"
    found["dtype of new tensors"] = _name(torch.get_default_dtype())
    found["precision of float32 products"] = torch.get_float32_matmul_precision()
    found["deterministic algorithms"] = "on" if torch.are_deterministic_algorithms_enabled() else "off"
    found["anomaly detection"] = "on" if torch.is_anomaly_enabled() else "off"
    found["threads"] = str(torch.get_num_threads())
    return found


def _shown(optimizer: Any) -> str:
    groups = optimizer.param_groups
    rates = list(dict.fromkeys(f"{group['lr']:.4g}" for group in groups if isinstance(group.get("lr"), float | int)))
    parts = [type(optimizer).__name__]
    if rates:
        parts.append(f"learning rate {', '.join(rates[:4])}")
    return ", ".join([*parts, f"{sum(len(group['params']) for group in groups)} tensors"])


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
