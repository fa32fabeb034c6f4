"""Jobs of several ranks that fail are explained once, with the rank and line to blame; their twins are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import check_failure, check_health, rank_scripts
from rank_jobs import CASES as CASES_FOLDER
from rank_jobs import LONG_STALL_AFTER, Case, cases, complaint, run_hosts, run_ranks
from running import Finished, marked_line

pytestmark = pytest.mark.timeout(200)

# Every run of the tests has the first script of each page of TM7xx, and one failure of one rank's own, in a sharded
# step; a death is in test_ranks.py. `make test-all` has all.
_ALWAYS = ("TM201_fully_sharded",)
CASES = [pytest.param(case, id=case.name, marks=() if case.name in _ALWAYS else pytest.mark.slow) for case in cases()]


def _first_of_each(scripts: list[Any]) -> list[Any]:
    """All scripts; the further ones of a code are slow."""
    first = {param.values[0]: param.id for param in reversed(scripts)}
    return [
        param
        if first[param.values[0]] == param.id
        else pytest.param(*param.values, id=param.id, marks=(*param.marks, pytest.mark.slow))
        for param in scripts
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_rank_and_the_line_to_blame_are_named(tmp_path: Path, case: Case) -> None:
    finished = run_ranks(tmp_path, case.failing, case.ranks)
    assert finished.returncode != 0
    assert not complaint(case, finished), f"{complaint(case, finished)}\n{finished.stderr}"


@pytest.mark.parametrize("case", CASES)
def test_the_healthy_twin_is_left_alone(tmp_path: Path, case: Case) -> None:
    finished = run_ranks(tmp_path, case.twin, case.ranks, LONG_STALL_AFTER)
    assert finished.returncode == 0, finished.stderr
    assert _told(finished) == []
    assert "torchmedic" not in finished.stderr


def _told(finished: Finished) -> list[str]:
    """The codes in a report, without notes that a run stood still: on a machine that is taken, an import may."""
    return [
        found.code
        for found in finished.report.diagnoses
        if found.severity != "note" or not found.code.startswith("TM5")
    ]


@pytest.mark.parametrize(("code", "ranks", "source"), _first_of_each(rank_scripts("fails")))
def test_the_failing_script_of_a_page(tmp_path: Path, code: str, ranks: int, source: str) -> None:
    check_failure(code, source, run_ranks(tmp_path, source, ranks))


@pytest.mark.parametrize(("code", "ranks", "source"), _first_of_each(rank_scripts("passes")))
def test_the_healthy_script_of_a_page(tmp_path: Path, code: str, ranks: int, source: str) -> None:
    check_health(run_ranks(tmp_path, source, ranks, LONG_STALL_AFTER))


@pytest.mark.parametrize("path", sorted((CASES_FOLDER / "healthy").glob("*.py")), ids=lambda path: path.stem)
def test_ranks_that_differ_on_purpose_are_left_alone(tmp_path: Path, path: Path) -> None:
    source = path.read_text()
    finished = run_ranks(tmp_path, source, int(source.split()[2]))
    assert finished.returncode == 0, finished.stderr
    assert _told(finished) == []
    assert "torchmedic" not in finished.stderr


OWN_EXCEPTION = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    name = "bird" if dist.get_rank() == 1 and step == 3 else "cat"
    weight = {"cat": 1.0}[name]  # <- cause
    loss = model(torch.randn(4, 4)).square().mean() * weight
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_exception_of_the_script_is_no_difference_between_ranks(tmp_path: Path) -> None:
    """Python's tracebacks of all ranks say what was raised, and the diagnosis says which rank began."""
    finished = run_ranks(tmp_path, OWN_EXCEPTION, 2)
    (found,) = finished.report.diagnoses
    assert (found.code, found.rank, found.cause_location and found.cause_location.line) == (
        "TM900",
        1,
        marked_line(OWN_EXCEPTION),
    )
    assert finished.stderr.count("error[") == 1
    assert "error[TM900]: rank 1: " in finished.stderr
    ends = finished.report.ranks
    assert [(end.rank, end.part, end.fate) for end in ends] == [(0, "victim", "raised"), (1, "culprit", "raised")]
    assert all(end.op and end.line for end in ends)


EARLIER_FILE = """
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANK, LIMIT = int(os.environ["RANK"]), timedelta(seconds=10)


def join(name):
    way = f"file://{Path(name).absolute()}"
    dist.init_process_group("gloo", init_method=way, rank=RANK, world_size=2, timeout=LIMIT)  # <- cause


join("first")
if RANK == 0:
    shutil.copy("first", "kept")
    Path("pid").write_text(str(os.getpid()))
dist.barrier()
dist.destroy_process_group()
if RANK == 1:  # else the new address of rank 0 may come first
    while Path("/proc", Path("pid").read_text()).exists():  # until then, somebody answers at its old address
        time.sleep(0.02)
    join("kept")
"""


@pytest.mark.slow
def test_a_file_with_the_addresses_of_an_earlier_job(tmp_path: Path) -> None:
    """gloo tries a refused address several times: a short limit would call that a hang."""
    finished = run_ranks(tmp_path, EARLIER_FILE, 2, LONG_STALL_AFTER)
    assert finished.returncode != 0
    (found,) = finished.report.diagnoses
    assert (found.code, found.cause_location and found.cause_location.line) == ("TM711", marked_line(EARLIER_FILE))
    assert "that of an earlier job" in found.cause


@pytest.mark.slow
def test_ranks_on_two_hosts_find_each_other_through_the_store_of_the_job(tmp_path: Path) -> None:
    case = next(case for case in cases() if case.name == "TM701_barrier_in_save")
    for finished in run_hosts(tmp_path, case.failing, case.ranks):
        errors = [found for found in finished.report.diagnoses if found.severity == "error"]
        assert [found.code for found in errors] == [case.code], finished.stderr
        assert errors[0].rank == case.culprit
        assert errors[0].cause_location is not None
        assert errors[0].cause_location.line == case.line
