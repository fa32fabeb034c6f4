"""Whether tensors are plain ones now, that have values: not inside of `torch.func` and of a dispatch mode."""

from __future__ import annotations

import torch

# To ask for the stack of `torch.func` itself would be enough to have one made for this thread, and autograd would copy
# it for every node of every backward from then on.
_in_functorch = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


def are_plain() -> bool:
    return not _in_functorch() and not _modes()
