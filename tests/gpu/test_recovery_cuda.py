"""Recovery on a card: a convolution keeps its kernel, and an update in parts fits where a whole one does not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import torchmedic

pytestmark = pytest.mark.gpu

MIB = 2**20


def allow(nbytes: int | None) -> None:
    """Let this process have so many bytes of the card."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else nbytes / total)


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    allow(None)


def test_a_convolution_keeps_its_kernel() -> None:
    """The workspace takes about 190 MiB. Without it, torch takes another kernel, with other bits, and keeps it."""
    torch.manual_seed(0)
    x = torch.randn(62, 256, 56, 56, device="cuda")
    weight = torch.nn.Parameter(torch.randn(512, 256, 1, 1, device="cuda"))
    wanted: list[torch.Tensor] = []

    def compute() -> None:
        with torch.no_grad():
            wanted.append(torch.conv2d(x, weight, None, 2))

    thread = threading.Thread(target=compute)  # which has kernels of its own to keep
    thread.start()
    thread.join()
    with torchmedic.recover() as happened:
        torch.optim.SGD([weight], lr=0.1)
        grown = torch.zeros(64 * MIB, device="cuda", requires_grad=True).exp()  # saves its result of 256 MiB,
        loss = grown.sum()
        del grown  # which only backward needs from now on
        torch.cuda.empty_cache()
        allow(torch.cuda.memory_reserved() + wanted[0].nbytes + 24 * MIB)
        found = torch.conv2d(x, weight, None, 2)
        allow(None)
        loss.backward()
    assert torch.equal(found, wanted[0])
    assert [getattr(each, "means", "") for each in happened] == ["activations"]
    assert torch.equal(torch.conv2d(x, weight, None, 2), wanted[0])


def test_an_update_in_parts() -> None:
    """State, gradients and weights take 1 GiB, and the temporary tensors of a whole update 256 MiB or more."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(4 * MIB, device="cuda")) for _ in range(16)]
    with torchmedic.recover() as happened:
        optimizer = torch.optim.AdamW(weights)
        for step in range(3):
            for each in weights:
                each.grad = torch.ones_like(each)
            if step:
                torch.cuda.empty_cache()
                allow(torch.cuda.memory_reserved() + 100 * MIB)
            optimizer.step()
            allow(None)
    assert happened == []
