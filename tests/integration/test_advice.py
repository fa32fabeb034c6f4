"""Advice that depends on what failed: each must be possible where it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

CASES = {
    "a-head-of-another-size": (
        """
import torch
from torch import nn


def net(classes):
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, classes))


net(3).load_state_dict(net(7).state_dict(), strict=False)
""",
        "take what does not fit ('1.weight', '1.bias') out of the state",
    ),
    "getattr-of-a-module": (
        """
import torch
from torch import nn


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


Wrapper(nn.Linear(2, 2)).weight
""",
        "ask `super().__getattr__(name)` first",
    ),
    "getattr-of-a-copy": (
        """
import copy
import torch


class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


copy.copy(Wrapper(torch.zeros(2)))
""",
        "raise AttributeError where the name is `inner`",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_fits_the_failure(tmp_path: Path, name: str) -> None:
    source, advice = CASES[name]
    told = [each.title for each in run_script(tmp_path, source).only.treatments]
    assert any(advice in each for each in told), told
