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


POLICY = """
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(4, 3).cuda()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for episode in range(4):
    chances = policy(torch.randn(2, 4, device="cuda")).softmax(-1)
    actions = torch.multinomial(chances, 1)
    rewards = torch.ones(2, 1, device="cuda")
    scores = (rewards - rewards.mean()) / rewards.std()  # <- cause
    loss = -(chances.gather(1, actions).log() * scores).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(episode, actions.tolist())
"""


def test_a_check_that_fails_for_nan_weights_is_an_echo(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(POLICY)

    finished = torchmedic(tmp_path, "train.py", timeout=240)

    assert finished.returncode == 1
    assert (finished.only.code, finished.only.cause_location.line) == ("TM201", marked_line(POLICY)), finished.stderr
