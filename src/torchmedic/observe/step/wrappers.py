"""Modules around a model that share its work out. Their mode is their own: `eval()` of the model leaves it alone."""

from __future__ import annotations

import torch

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """The model in a wrapper; else the module itself."""
    return module.module if isinstance(module, _WRAPPERS) else module
