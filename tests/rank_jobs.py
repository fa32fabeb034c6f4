"""How tests run a job of several ranks: in a folder of its own, with torchmedic in every rank or around the launcher.

A case is a script whose first line says how many ranks it has, which of them is to blame, and whether a cure passes. A
line that ends in `# twin: CODE` is replaced by CODE in the healthy twin; `# <- cause` marks the line to blame.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from running import Finished, clean_environment, marked_line
from zygote import Zygote

CASES = Path(__file__).parent / "integration" / "rank_cases"
STALL_AFTER = 4
LONG_STALL_AFTER = (
    60  # for jobs that do not hang: on a machine that is taken, a healthy start takes more than four seconds
)
_TWIN = re.compile(r"^( *)(.*?)  # twin: (.*)$", re.M)
_HEAD = re.compile(r"# ranks: (\d+)  culprit: (\d+|any)(  cured)?")


class Case(NamedTuple):
    name: str
    ranks: int
    culprit: int | None
    source: str
    is_cured: bool = False  # a cure passes on the step of the rank

    @property
    def code(self) -> str:
        return self.name.partition("_")[0]

    @property
    def failing(self) -> str:
        return _TWIN.sub(lambda found: found[1] + found[2], self.source)

    @property
    def twin(self) -> str:
        return _TWIN.sub(lambda found: found[1] + found[3], self.source)

    @property
    def line(self) -> int:
        return marked_line(self.failing)


def cases() -> list[Case]:
    found = []
    for path in sorted(CASES.glob("*.py")):
        source = path.read_text()
        head = _HEAD.match(source)
        assert head is not None, path
        found.append(Case(path.stem, int(head[1]), None if head[2] == "any" else int(head[2]), source, bool(head[3])))
    return found


def run_ranks(folder: Path, source: str, ranks: int, stall_after: int = STALL_AFTER) -> Finished:
    """Run a script as `srun` does: one torchmedic per rank, no launcher above them; each is forked, as torch is slow.

    The texts of all ranks are joined. A rank whose job has ended fails by itself: nobody ends it.
    """
    ended = _run_each([folder] * ranks, source, local=ranks, stall_after=stall_after)
    status = max(each[0] for each in ended)
    return Finished(status, "".join(each[1] for each in ended), "".join(each[2] for each in ended), folder / "run")


def run_hosts(folder: Path, source: str, hosts: int) -> list[Finished]:
    """Run a script with one rank on each of several hosts: in a folder of its own, with a run folder of its own."""
    places = [folder / f"host{number}" for number in range(hosts)]
    for place in places:
        place.mkdir()
    ended = _run_each(places, source, local=1)
    return [Finished(*each, place / "run") for each, place in zip(ended, places, strict=True)]


def _run_each(
    folders: list[Path], source: str, local: int, stall_after: int = STALL_AFTER
) -> list[tuple[int, str, str]]:
    command = ["run", "--output", "run", "--stall-after", str(stall_after), "--on-stall", "kill", "train.py"]
    port = free_port()

    def run(rank: int) -> tuple[int, str, str]:
        (folders[rank] / "train.py").write_text(source)
        named = {"RANK": rank, "WORLD_SIZE": len(folders), "LOCAL_WORLD_SIZE": local, "MASTER_PORT": port}
        named["LOCAL_RANK"] = rank % local
        environment = {name: str(value) for name, value in named.items()}
        clean = clean_environment(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", **environment)
        status = Zygote.start(folders[rank], command, clean, 120, name=f".{rank}").wait()
        return status, *Zygote.output(folders[rank], f".{rank}")

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(run, range(len(folders))))


def free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, which other tests make all the time."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_job(folder: Path, source: str, ranks: int, *, outside: bool = False, timeout: float = 120) -> Finished:
    """Run a script with torchrun; torchmedic runs in each rank, or around the launcher."""
    (folder / "train.py").write_text(source)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launch.append(f"--master-port={free_port()}")
    medic = ["torchmedic", "run", "--output", "run", "--stall-after", str(STALL_AFTER), "--on-stall", "kill"]
    command = (
        [sys.executable, "-m", *medic, "--", *launch, "train.py"] if outside else [*launch, "-m", *medic, "train.py"]
    )
    environment = clean_environment(GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    return Finished(done.returncode, done.stdout, done.stderr, folder / "run")


def complaint(case: Case, finished: Finished) -> str:
    """What is wrong with the diagnosis of a failing case; empty if it is right."""
    told = [(found.code, found.rank, place and place.line) for found in finished.report.diagnoses
            if found.severity != "note" for place in [found.cause_location]]  # fmt: skip
    wanted = (case.code, case.culprit, case.line)
    right = len(told) == 1 and told[0] in (wanted, (case.code, told[0][1] if case.culprit is None else -1, case.line))
    once = finished.stderr.count("error[") == 1
    told_rank = next((found.rank for found in finished.report.diagnoses if found.severity == "error"), None)
    named = r"\d+" if case.culprit is None else str(told_rank)  # where all ranks fail alike, any of them may speak
    if not re.search(rf"error\[\w+\]:(.*\branks?\b.*\b{named}\b|.*\b\d+ ranks\b)", finished.stderr):
        return f"the text does not name rank {told_rank}"
    if case.is_cured and not any(cure.proven for found in finished.report.diagnoses for cure in found.treatments):
        return "no cure was proven"
    return "" if right and once else f"{told} in place of {wanted}, said {finished.stderr.count('error[')} times"
