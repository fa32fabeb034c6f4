"""Exceptions on the way from a dataset to the loop: the worker's own line, the item, the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Finished, marked_line, run_script, torchmedic

HEAD = """\
import os, sys
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

"""

FAILURES = {
    "main-process": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        scale = 0 if index == 17 else 1
        return torch.ones(3) * (1 / scale)  # <- cause
for x in DataLoader(Data(), batch_size=4, shuffle=True):
    pass
""",
        "item 17",
    ),
    "exception-that-cannot-be-rebuilt": (
        "TM820",
        """
class Bad(Exception):
    def __init__(self, one, two):
        super().__init__(one)
    def __str__(self):
        raise ValueError("no text")
def load(index):
    raise Bad("corrupt", index)  # <- cause
class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return load(index) if index == 9 else torch.ones(1)
def main():
    for x in DataLoader(Data(), batch_size=4, num_workers=2, persistent_workers=True):
        pass
main()
""",
        "item 9",
    ),
    "a-part-that-is-none": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        image = None if index == 7 else torch.ones(3)
        return image, index  # <- cause
for image, label in DataLoader(Data(), batch_size=4):
    pass
""",
        "a part of item 7 of the dataset is None",
    ),
    "sampler-of-the-whole-dataset": (
        "TM820",
        """
from torch.utils.data import SequentialSampler, Subset
whole = [torch.ones(1)] * 9
part = Subset(whole, [0, 2, 4])
loader = DataLoader(part, batch_size=4, sampler=SequentialSampler(whole))  # <- cause
for x in loader:
    pass
""",
        "`SequentialSampler` asks for item 3 of a dataset with 3 items",
    ),
    "random-split": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        if i == 9:
            raise OSError("cannot read img_9.png")  # <- cause
        return torch.ones(1)
for part in random_split(Data(), [10, 10], torch.Generator().manual_seed(1)):
    for x in DataLoader(part, batch_size=4, num_workers=1):
        pass
""",
        "item 9",
    ),
    "getitems": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return [1, 2, 3][i % 4]  # <- cause
    def __getitems__(self, indices):
        return [self[i] for i in indices]
for x in DataLoader(Data(), batch_size=4, num_workers=1):
    pass
""",
        "item 3",
    ),
    "iterable": (
        "TM820",
        """
class Data(IterableDataset):
    def __iter__(self):
        for n in range(20):
            if n == 10:
                raise RuntimeError("bad record")  # <- cause
            yield torch.ones(2)
for x in DataLoader(Data(), batch_size=4, num_workers=1):
    pass
""",
        "the dataset raised RuntimeError",
    ),
    "batch-sampler-of-tuples": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, key):
        n, size = key
        return torch.zeros(size)[n]  # <- cause
class Pairs:
    def __iter__(self):
        yield [(0, 3), (1, 3)]
        yield [(2, 3), (3, 3)]
    def __len__(self):
        return 2
for x in DataLoader(Data(), batch_sampler=Pairs(), num_workers=1):
    pass
""",
        "item [3, 3]",
    ),
    "collate": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return {"x": torch.ones(2)}
def collate(batch):
    x = torch.stack([item["x"] for item in batch])
    return x, torch.tensor([item["y"] for item in batch])  # <- cause
for x in DataLoader(Data(), batch_size=4, num_workers=2, collate_fn=collate):
    pass
""",
        "the collate function raised KeyError",
    ),
    "worker-init": (
        "TM820",
        """
def begin(worker):
    open(f"/nonexistent/{worker}")  # <- cause
for x in DataLoader(TensorDataset(torch.zeros(8)), num_workers=1, worker_init_fn=begin):
    pass
""",
        "FileNotFoundError",
    ),
    "sampler-beyond-the-end": (
        "TM820",
        """
loader = DataLoader(TensorDataset(torch.zeros(8)), sampler=[1, 2, 30])  # <- cause
for x in loader:
    pass
""",
        "item 30",
    ),
    "none": (
        "TM820",
        """
class Data(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        if i == 5:
            return None  # <- cause
        return torch.ones(2)
for x in DataLoader(Data(), batch_size=4, num_workers=1):
    pass
""",
        "the dataset returned None for item 5",
    ),
    "unequal-in-the-main-process": (
        "TM821",
        """
class Data(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        if i < 0:
            return None
        x = torch.ones(3, 8 if i != 6 else 7)
        return x, i  # <- cause
for x, y in DataLoader(Data(), batch_size=4):
    pass
""",
        "([3, 8], int) and ([3, 7], int)",
    ),
    "unequal-keys": (
        "TM821",
        """
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        item = {"x": torch.ones(2)}
        if i == 0:
            item["mask"] = torch.ones(2)
        return item  # <- cause
for x in DataLoader(Data(), batch_size=4, num_workers=1):
    pass
""",
        "{x: [2], mask: [2]} and {x: [2]}",
    ),
    "unequal-list": (
        "TM821",
        """
data = [torch.ones(n) for n in (3, 3, 4, 3)]
loader = DataLoader(data, batch_size=4)  # <- cause
for x in loader:
    pass
""",
        "[3] and [4]",
    ),
    "unequal-in-own-collate": (
        "TM821",
        """
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.ones(i + 1), i
def collate(batch):
    xs, ys = zip(*batch)
    return torch.stack(xs), torch.tensor(ys)  # <- cause
for x in DataLoader(Data(), batch_size=4, num_workers=1, collate_fn=collate):
    pass
""",
        "([1], int) and ([2], int)",
    ),
    "exit-in-a-function": (
        "TM822",
        """
def stop():
    sys.exit("no")  # <- cause
class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        if i == 13:
            stop()
        return torch.ones(2)
for x in DataLoader(Data(), batch_size=4, num_workers=2):
    pass
""",
        "exited with status 1",
    ),
    "exit-in-a-method-of-the-dataset": (
        "TM822",
        """
class Data(Dataset):
    def __len__(self):
        return 40
    def read(self, i):
        if i == 17:
            sys.exit(2)  # <- cause
        return torch.ones(2)
    def __getitem__(self, i):
        return self.read(i)
for x in DataLoader(Data(), batch_size=4, num_workers=2):
    pass
""",
        "exited with status 2",
    ),
    "exit-in-collate": (
        "TM822",
        """
class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.ones(2), i
class Collate:
    def __call__(self, batch):
        if any(i == 21 for _, i in batch):
            os._exit(9)  # <- cause
        return torch.stack([x for x, _ in batch])
for x in DataLoader(Data(), batch_size=4, num_workers=2, collate_fn=Collate()):
    pass
""",
        "exited with status 9",
    ),
    "killed-in-a-stream-of-another-loader": (
        "TM822",
        """
class Noise(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        return torch.ones(64, 64)
class Stream(IterableDataset):
    def __iter__(self):
        for i in range(400):
            if i == 60:
                os.kill(os.getpid(), 9)  # <- cause
            yield torch.ones(64, 64)
noise = DataLoader(Noise(), batch_size=4, num_workers=1, prefetch_factor=4)
for x, y in zip(noise, DataLoader(Stream(), batch_size=4, num_workers=1)):
    pass
""",
        "was ended by SIGKILL",
    ),
    "no-memory-in-a-worker": (
        "TM401",
        """
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        n = 10**6 if i == 3 else 1
        return torch.zeros(n, n)  # <- cause
for x in DataLoader(Data(), num_workers=1):
    pass
""",
        "3.6 TiB",
    ),
    "recursion-in-a-worker": (
        "TM840",
        """
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return self[i]  # <- cause
for x in DataLoader(Data(), num_workers=1):
    pass
""",
        "`__getitem__` calls itself",
    ),
}


def blamed(finished: Finished) -> tuple[str, int]:
    place = finished.only.cause_location
    assert place is not None, finished.stderr
    return place.file, place.line


@pytest.mark.parametrize("name", FAILURES)
def test_the_line_of_the_dataset_is_blamed(tmp_path: Path, name: str) -> None:
    code, body, words = FAILURES[name]
    source = HEAD + body

    finished = run_script(tmp_path, source)
    assert (finished.only.code, blamed(finished)) == (code, ("train.py", marked_line(source))), finished.stderr
    assert words in finished.only.message
    assert "fault of its own" not in finished.stderr


@pytest.mark.slow
def test_a_worker_of_a_new_interpreter_tells_as_much(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)
class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 17:
            raise Odd("bad", index)  # <- cause
        return torch.ones(3)
if __name__ == "__main__":
    for x in DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="spawn"):
        pass
"""
    )
    (tmp_path / "train.py").write_text(source)

    finished = torchmedic(tmp_path, "train.py")
    assert (finished.only.code, blamed(finished)) == ("TM820", ("train.py", marked_line(source))), finished.stderr
    assert "item 17" in finished.only.message


def test_the_rules_about_operations_are_asked_too(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.ones(3, 2) @ torch.ones(2 + i, 3)  # <- cause
for x in DataLoader(Data(), batch_size=4):
    pass
"""
    )
    finished = run_script(tmp_path, source)
    assert finished.only.code == "TM820"
    assert any("TM151" in fact for fact in finished.only.evidence)


def test_an_exception_that_the_loop_gets_over_is_none(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 3:
            raise ValueError("bad")
        return torch.ones(2)
batches = iter(DataLoader(Data(), batch_size=2, num_workers=1))
while True:
    try:
        next(batches)
    except StopIteration:
        break
    except ValueError:
        continue
"""
    )
    finished = run_script(tmp_path, source)
    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == ()
