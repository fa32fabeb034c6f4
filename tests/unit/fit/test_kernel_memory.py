"""Memory that kernels of CUDA take for themselves, against what an H200 with torch 2.11 was seen to take."""

from __future__ import annotations

import pytest
import torch

from torchmedic.fit.answers import passing_bytes
from torchmedic.fit.cards import find_card


@pytest.mark.parametrize(
    ("shape", "dims", "nbytes"),
    [
        ((8192, 1024), [0], 64 << 20),  # a linear layer of a transformer encoder
        ((8192, 20000), [0], 143_360_000),  # the last layer of a tagger
        ((32, 256, 1024), [0, 1], 64 << 20),
        ((8192, 1024), [1], 0),  # along the fastest dimension
        ((64, 1024), [0], 0),  # few rows
        ((0, 4), [0], 0),
    ],
)
def test_partial_results_of_a_sum(shape: tuple[int, ...], dims: list[int], nbytes: int) -> None:
    tensor = torch.empty(shape, device="meta")
    assert passing_bytes("sum", (tensor, dims, True), find_card("H200")) == nbytes


def test_a_sum_over_everything_takes_nothing() -> None:
    tensor = torch.empty(64, 8, device="meta")
    assert passing_bytes("sum", (tensor, []), find_card("H200")) == 0
