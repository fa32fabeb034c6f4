"""Tensors on the CPU and on a real card, each script a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_cases import Case, cases, check
from running import torchmedic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases("device_mismatch", "cuda"))
def test_the_stray_is_named_on_the_card(tmp_path: Path, case: Case) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)

    check(case, torchmedic(tmp_path, "train.py"))
