"""Two ranks in two network namespaces, as on two hosts: each has its own address and folder, and both know why."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_jobs import STALL_AFTER, cases, free_port
from running import clean_environment

from torchmedic.runfolder import files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`"),
]
LINK = "medic"  # the name of the network card in both namespaces


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces that a pair of virtual network cards connects."""
    names = [f"medic{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", LINK)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", LINK, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def test_both_hosts_name_the_rank_and_the_line(tmp_path: Path, hosts: list[str]) -> None:
    case = next(case for case in cases() if case.name == "TM701_barrier_in_save")
    port = str(free_port())
    started = []
    for rank, name in enumerate(hosts):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(case.failing)
        environment = clean_environment(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="10.77.0.1",
            MASTER_PORT=port,
            GLOO_SOCKET_IFNAME=LINK,
        )
        medic = [sys.executable, "-m", "torchmedic", "run", "--output", "run", "--stall-after", str(STALL_AFTER)]
        command = ["ip", "netns", "exec", name, *medic, "--on-stall", "kill", "train.py"]
        started.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    texts = [each.communicate(timeout=150)[1] for each in started]
    for name, text in zip(hosts, texts, strict=True):
        found = [each for each in files.read_report(tmp_path / name / "run").diagnoses if each.severity == "error"]
        assert [(each.code, each.rank) for each in found] == [("TM701", case.culprit)], text
        assert found[0].cause_location is not None
        assert found[0].cause_location.line == case.line
