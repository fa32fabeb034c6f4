"""Sizes and names of cards as people write them."""

from __future__ import annotations

import pytest

from torchmedic.errors import UsageError
from torchmedic.fit.cards import GIB, chosen_card, find_card, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * GIB), ("24G", 24 * GIB), (" 24 gib ", 24 * GIB), ("24GB", 24 * 10**9), ("1.5GiB", 3 * GIB // 2)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "0GiB", "-3GiB", "24XB"])
def test_what_is_no_size_is_said_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (5, 2048, 3 * GIB // 2)] == ["5 B", "2.00 KiB", "1.50 GiB"]


def test_names_of_cards() -> None:
    assert find_card("NVIDIA H200").name == "H200"
    assert find_card("rtx 4090").name == "RTX-4090"
    assert find_card("a100-80gb").name == "A100-80GB"
    with pytest.raises(UsageError, match="several cards"):
        find_card("A100")
    with pytest.raises(UsageError, match="no such card"):
        find_card("GTX 970")


def test_workspaces_of_cublas_by_architecture() -> None:
    assert find_card("H200").cublas_workspace == 32 << 20
    assert find_card("A100-80GB").cublas_workspace == 8_519_680
    assert chosen_card("", 24 * GIB)[0].memory == 24 * GIB
