"""The memory that `torchmedic fit` predicts without a card is what the card counts.

python -m pytest -m gpu tests/gpu/test_fit_cuda.py -s
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = f"""
import json
import sys

import torch

sys.path.insert(0, {str(BENCHMARKS)!r})
import gpt

model = gpt.GPTLoss("gpt2-124m", 1024, "cuda").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randint(0, gpt.VOCABULARY, (8, 1025), device="cuda")).backward()
    optimizer.step()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""


def test_the_prediction_is_what_the_card_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    fit = ["-m", "torchmedic", "fit", "train.py", "--device-name", "H200", "--no-plans", "--format", "json"]
    predicted, real = (
        subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=True
        ).stdout
        for words in (fit, ["train.py"])
    )
    need = json.loads(predicted)["need"]
    allocated, reserved = json.loads(real.splitlines()[-1])
    print(f"\nallocated {need['allocated'] / allocated - 1:+.2%}, reserved {need['reserved'] / reserved - 1:+.2%}")
    assert need["allocated"] == pytest.approx(allocated, rel=0.03)
    assert need["reserved"] == pytest.approx(reserved, rel=0.08)
