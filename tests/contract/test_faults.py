"""A bug of ours never stops or changes the training: every hook is made to fail, and the run goes on unharmed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run_script

SOURCE = Path(__file__).parents[2] / "src" / "torchmedic"
HOOKS = sorted(
    name
    for name in {
        name for path in SOURCE.rglob("*.py") for name in re.findall(r'contained\("([a-z_.]+)"\)', path.read_text())
    }
    # Of processes without a parent, runs with --recover, and ranks: test_watched_parts, test_recovery, test_ranks.
    # Those of frameworks are only called by scripts that use them.
    if not name.startswith(("session.", "recover."))
    and name not in ("observe.rank_facts", "integrations.accelerate", "integrations.ray")
)

# Comes past every hook: data with a worker and a fork, a scaler, an optimizer, NaN, an exception in a worker, and
# an exit that somebody catches; and a gate that is shut, for the check-up.
SCRIPT = """
import multiprocessing
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 11:
            raise KeyError("a missing sample")
        return torch.full((4,), float(index))


def quiet():
    pass


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
child = multiprocessing.get_context("fork").Process(target=quiet)
child.start()
child.join()
print(child.exitcode)
nn.functional.relu(-torch.ones(2, requires_grad=True)).sum().backward()  # worth a look, and no mistake
try:
    sys.exit(3)
except SystemExit as end:
    print(end)
for step, x in enumerate(DataLoader(Data(), batch_size=4, num_workers=1)):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    if step == 1:
        loss = loss * float("nan")
    scaler.scale(loss).backward()
    print(step, loss.item(), model.weight.grad.tolist(), flush=True)
    scaler.step(optimizer) if step == 0 else optimizer.step()
    scaler.update() if step == 0 else None
    print(model.weight.tolist(), flush=True)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    finished = run_script(tmp_path_factory.mktemp("reference"), SCRIPT)
    assert "of its own" not in finished.stderr
    assert {diagnosis.severity for diagnosis in finished.report.diagnoses} == {"error"}, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_in_a_hook_is_contained_and_mentioned_once(tmp_path: Path, reference: str, hook: str) -> None:
    finished = run_script(tmp_path, SCRIPT, TORCHMEDIC_INJECT_FAULT=hook)

    assert (finished.returncode, finished.stdout) == (1, reference), finished.stderr
    assert "KeyError: 'a missing sample'" in finished.stderr
    mentions = [line for line in finished.stderr.splitlines() if line.startswith("torchmedic: a fault of its own")]
    assert len(mentions) == 1, finished.stderr
    assert "injected fault" in mentions[0]
