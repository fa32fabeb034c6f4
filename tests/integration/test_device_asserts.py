"""A device that died of a failed check is traced to the line, by running the step again on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_asserts import KINDS, PAIRS, program
from running import marked_line, run_script


@pytest.mark.parametrize(("kind", "shape"), PAIRS, ids=[f"{kind}, {shape}" for kind, shape in PAIRS])
def test_the_line_is_named(tmp_path: Path, kind: str, shape: str) -> None:
    source = program(kind, shape)
    finished = run_script(tmp_path, source)

    diagnosis = finished.only
    assert diagnosis.code == KINDS[kind][0], finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert finished.report.outcome.symptom == "cuda-error"
