"""Check of the installed torch: whether it can be imported at all."""

from __future__ import annotations

from collections.abc import Iterator

from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn


def check(situation: Situation) -> Iterator[Finding]:
    torch = situation.torch
    if torch is None:
        return
    if "did not end" in torch.error:
        yield warn("torch", torch.error, "is it on a network file system that is slow or does not answer?")
    elif torch.error:
        missing = "No module named 'torch'" in torch.error
        yield fail("torch", torch.error, "install torch into the environment of torchmedic" if missing else "")
    else:
        build = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
        yield ok("torch", f"{torch.version}, {build}")
