"""Failed checks of kernels on the real card, traced to the line in the first crash."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from device_asserts import KINDS, PAIRS, program
from running import Finished, marked_line, torchmedic

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Finished]:
    """All of them, several at a time: each is a process of its own, and most of it is waiting for imports."""

    base: Path = tmp_path_factory.mktemp("asserts")

    def run(pair: tuple[str, str]) -> Finished:
        folder = base / str(PAIRS.index(pair))
        folder.mkdir()
        (folder / "train.py").write_text(program(*pair))
        return torchmedic(folder, "train.py", timeout=240)

    with ThreadPoolExecutor(6) as pool:
        return dict(zip(PAIRS, pool.map(run, PAIRS), strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{kind}, {shape}" for kind, shape in PAIRS])
def test_the_line_is_named(runs: dict[tuple[str, str], Finished], pair: tuple[str, str]) -> None:
    finished = runs[pair]
    diagnosis = finished.only

    assert diagnosis.code == KINDS[pair[0]][0], finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(program(*pair)), finished.stderr
    assert diagnosis.grade == "proven", finished.stderr
    assert any("the device's own words" in fact for fact in diagnosis.evidence), finished.stderr
