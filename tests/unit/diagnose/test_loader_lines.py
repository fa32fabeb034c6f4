"""The line that makes the loader whose batches several ranks share, in the file of the loop or in another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.diagnose.rules.ranks._loader_lines import loader_made_at
from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import RankFacts

DATA = """
def build(split):
    return DataLoader(data, shuffle=split == "train")

def build_valid():
    return DataLoader(data, sampler=given)
"""
MODULE = """
class Module:
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=4)
"""
TRAIN = "from helpers.data import build\nloader = build('train')\nfor x in loader:\n    pass\n"
GIVEN = "def fit(model, loader):\n    for x in loader:\n        pass\n"
MAIN = "import helpers.data\nfrom loop import fit\nfit(model, helpers.data.Module().train_dataloader())\n"


@pytest.mark.parametrize(
    ("data", "loop", "line", "made"),
    [
        (DATA, TRAIN, 3, ("helpers/data.py", 3)),  # by the function that the loop's file calls
        (MODULE, GIVEN, 2, ("helpers/data.py", 4)),  # the only one that shuffles, found from the main file
        (DATA, GIVEN, 2, ("loop.py", 2)),  # either of two
    ],
)
def test_a_loader_that_is_made_in_another_file(
    tmp_path: Path, data: str, loop: str, line: int, made: tuple[str, int]
) -> None:
    (tmp_path / "helpers").mkdir()
    for name, text in {"helpers/data.py": data, "loop.py": loop, "train.py": MAIN}.items():
        (tmp_path / name).write_text(text)
    main, taken = (
        StackFrame(file=str(tmp_path / name), line=number, function="")
        for name, number in (("train.py", 3), ("loop.py", line))
    )
    facts = RankFacts(rank=0, pid=1, world_size=2, sampler="RandomSampler", loading=taken, wrapped_at=main)
    assert loader_made_at(facts, taken) == (str(tmp_path / made[0]), made[1])
