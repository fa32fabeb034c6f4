"""What the installed torch is and can do, told by itself in a process of its own: `python -m` this, with a time limit.

A line of JSON with the facts, and with `--try-backward THREADS` one more when a convolution has come back from its
backward pass: with fewer OpenMP threads than it counts on, it never does.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def facts() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

        available = bool(torch.cuda.is_available())
        count = int(torch.cuda.device_count())
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    archs = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    why = ""
    if built and not available:
        try:
            torch._C._cuda_init()
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        why = why or next((str(one.message).splitlines()[0] for one in said if "CUDA" in str(one.message)), "")
    return {
        "version": str(torch.__version__),
        "cuda": built,
        "available": available,
        "devices": count,
        "why": why,
        "archs": archs.split() if archs else [],
        "threads": int(torch.get_num_threads()),
    }


def try_backward(threads: int) -> None:
    """A small step that needs a whole team of OpenMP threads; 0 of them for as many as torch takes by itself."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    layer = torch.nn.Conv2d(16, 16, 3)
    layer(torch.ones(16, 16, 64, 64, requires_grad=True)).sum().backward()


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    _tell(facts())
    if "--try-backward" in sys.argv:
        try_backward(int(sys.argv[-1]))
        _tell({"backward": True})
