"""Tensors on two devices, and CUDA that does not exist: which line, and why; `meta` stands for the second device."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_cases import Case, cases, check
from running import run_script


@pytest.mark.parametrize("case", [*cases("device_mismatch", "meta"), *cases("cuda_itself", "meta")])
def test_the_cause_is_named(tmp_path: Path, case: Case) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)

    check(case, run_script(tmp_path, case.script, **case.environment))
