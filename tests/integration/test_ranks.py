"""Several ranks, started either way round, end in one report; the root is told once, its echoes not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rank_jobs import free_port, run_job
from running import clean_environment, marked_line, run_script

from torchmedic.runfolder import files

pytestmark = pytest.mark.timeout(300)  # three processes that import torch

SCRIPT = """
import os, signal, subprocess, sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def fit(how):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        width = 5 if step == 2 and how == "shape" else 4
        if step == 2 and how == "kill" and dist.get_rank() == 1:
            # Who watches it is late: the other rank has given up waiting for word by then.
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getppid()}"], start_new_session=True)
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.randn(3, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sys.stdout.write(f"done {dist.get_rank()}\\n")


# The model must be gone before the group: as its last owner it would wait for the threads of gloo and hold the GIL,
# which these need to drop the context of backward that their work carries (pytorch 56297).
dist.init_process_group("gloo")
fit(sys.argv[1])
dist.barrier()  # gloo may abort in a rank whose peer is gone before it
dist.destroy_process_group()
"""
FORWARD = 1 + SCRIPT.splitlines().index("        loss = model(torch.randn(3, width)).square().mean()")


def torchrun(folder: Path, how: str, *, outside: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """torchmedic around torchrun, or in each of its ranks."""
    (folder / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    medic = ["torchmedic", "run", "--output", "run"]
    command = (
        [sys.executable, "-m", *medic, "--", *launch, "train.py", how]
        if outside
        else [*launch, "-m", *medic, "train.py", how]
    )
    environment = clean_environment(GLOO_SOCKET_IFNAME="lo", **variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize(
    ("outside", "how"),
    [
        pytest.param(True, "shape", id="torchmedic around torchrun, an exception"),
        pytest.param(False, "kill", id="torchmedic in every rank, a kill"),
        pytest.param(False, "shape", id="torchmedic in every rank, an exception", marks=pytest.mark.slow),
        pytest.param(True, "kill", id="torchmedic around torchrun, a kill", marks=pytest.mark.slow),
    ],
)
def test_one_report(tmp_path: Path, outside: bool, how: str) -> None:
    done = torchrun(tmp_path, how, outside=outside)

    assert done.returncode == 1
    report = files.read_report(tmp_path / "run")
    code = {"shape": "TM151", "kill": "TM805"}[how]
    assert done.stderr.count("error[") == done.stderr.count(f"error[{code}]") == 1, done.stderr
    # torchrun ends the other rank as soon as one has failed, so both may or may not get to say it.
    ranks = sorted(found.rank for found in report.diagnoses)
    assert {found.code for found in report.diagnoses} == {code}
    assert ranks in ([[0], [1], [0, 1]] if how == "shape" else [[1]])
    assert (report.outcome.steps, report.outcome.symptom) == (2, "exception" if how == "shape" else "death")
    if how == "shape":  # torchrun shows what the rank itself wrote to its error file
        shown = done.stderr.partition("Root Cause (first observed failure)")[2]
        assert "error_file: /" in shown
        assert "mat1 and mat2 shapes cannot be multiplied" in shown
        assert "exitcode  : 1 " in shown
    # If both failed alike, the one that was first has told it, and the report keeps the lower one.
    assert f"error[{code}]: rank 1: " in done.stderr or (how == "shape" and f"error[{code}]: rank 0: " in done.stderr)
    for found in report.diagnoses:
        assert found.cause_location is not None
        # A killed rank was last seen at its last finished step.
        assert found.cause_location.line == (FORWARD if how == "shape" else FORWARD + 3)


@pytest.mark.slow  # healthy jobs are in test_rank_jobs.py
def test_healthy_ranks_share_a_folder_and_say_nothing(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "well", outside=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1", "done", "done"])
    assert "torchmedic" not in done.stderr
    report = files.read_report(tmp_path / "run")
    assert (report.outcome.exit_status, report.outcome.steps, report.diagnoses) == (0, 4, ())


@pytest.mark.slow  # faults of all hooks are in tests/contract/test_faults.py
def test_a_fault_in_the_facts_of_a_rank_is_contained(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "well", outside=False, TORCHMEDIC_INJECT_FAULT="observe.rank_facts")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1", "done", "done"])
    assert done.stderr.count("torchmedic: a fault of its own") == 2, done.stderr  # once per rank


EXIT = """
import sys, time
import torch
import torch.distributed as dist


def check():
    if dist.get_rank() == 1:
        sys.exit("no data")  # <- cause
    time.sleep(20)  # until the launcher ends this rank
    sys.exit(0)


dist.init_process_group("gloo")
check()
"""


def test_an_exit_of_one_rank_before_any_collective(tmp_path: Path) -> None:
    """The launcher ends the other rank, and only tells that a process has failed."""
    found = run_job(tmp_path, EXIT, 2, outside=True).only
    place = found.cause_location
    assert place is not None
    assert (found.code, found.rank, place.line) == ("TM900", 1, marked_line(EXIT))


OPTIONS = """
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
args = parser.parse_args()  # <- cause
dist.init_process_group("gloo")
"""


def test_an_option_that_the_launcher_does_not_pass(tmp_path: Path) -> None:
    """All ranks end before they join the job, and the launcher only tells that they have failed."""
    found = run_job(tmp_path, OPTIONS, 2, outside=True).only
    place = found.cause_location
    assert place is not None
    assert (found.code, place.line) == ("TM900", marked_line(OPTIONS))
    assert "LOCAL_RANK" in found.treatments[0].title


@pytest.mark.slow
def test_an_option_with_a_wrong_value(tmp_path: Path) -> None:
    """argparse catches an exception of its own before it ends the process."""
    script = OPTIONS.replace("required=True", "default=0").replace("parse_args()", 'parse_args(["--local_rank", "a"])')
    found = run_job(tmp_path, script, 2, outside=True).only
    place = found.cause_location
    assert place is not None
    assert (found.code, place.line, found.treatments) == ("TM900", marked_line(script), ())


REFUSED = """
import torch
import torch.distributed as dist


def wrap():
    text = "NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    raise dist.DistBackendError(text)  # as NCCL has it on a host with one GPU


wrap()
"""


def test_the_refusal_of_a_gpu_that_two_ranks_use(tmp_path: Path) -> None:
    """NCCL itself needs a card; what it says is raised here by the script."""
    found = run_script(tmp_path, REFUSED).only
    assert (found.code, found.grade) == ("TM720", "proven")
    assert "ranks 0 and 1 use the same GPU" in found.message
