"""The scripts on the pages that need a real card, each a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import check_failure, check_health, scripts
from running import Finished, torchmedic

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def run_page(folder: Path, source: str) -> Finished:
    (folder / "train.py").write_text(source)
    return torchmedic(folder, "train.py")


@pytest.mark.parametrize(("code", "source"), scripts("fails", gpu=True))
def test_the_failing_script_is_diagnosed_on_the_card(tmp_path: Path, code: str, source: str) -> None:
    check_failure(code, source, run_page(tmp_path, source))


@pytest.mark.parametrize(("code", "source"), scripts("passes", gpu=True))
def test_the_cured_twin_is_healthy_on_the_card(tmp_path: Path, code: str, source: str) -> None:
    check_health(run_page(tmp_path, source))
