"""Every function in `graph_cases` raises; its diagnosis must name the code and the line that it marks itself.

They run in this process, which costs milliseconds. What only a real run can show is at the end.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import marked_line, run_script
from torch import nn

from torchmedic.contained import on_fault
from torchmedic.detect.failures.exceptions import Raised, symptom_of
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Diagnosis, Fault

CASES = Path(__file__).parent / "graph_cases"
FAMILIES = ("shapes.", "modules.", "autograd.backward_on_non_scalar")
GRAPH_RULES = tuple(rule for rule in registry.RAISED if rule.startswith(FAMILIES))


def cases() -> list[Any]:
    found = []
    for path in sorted(CASES.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"graph_cases_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [
            pytest.param(value, id=f"{path.stem}-{name.removeprefix('case_')}")
            for name, value in vars(module).items()
            if name.startswith("case_")
        ]
    return found


def expected(case: Callable[[], None]) -> tuple[str, int]:
    lines, first = inspect.getsourcelines(case)
    marks = [(found[1], first + at) for at, line in enumerate(lines) if (found := re.search(r"# <- (TM\d+)", line))]
    assert len(marks) == 1, f"mark exactly one line of {case.__name__}"
    return marks[0]


def diagnosed(case: Callable[[], None]) -> Diagnosis:
    """The diagnosis of what a case raises, by the rules of this family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as raised:  # noqa: PT011 - every case raises another one
            case()
        error = raised.value
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next
        incident = Raised(
            error=error,
            symptom=symptom_of(error, None),
            step=0,
            phase="other",
            rank=0,
            batch=getattr(case, "batch", ()),
        )
        faults: list[Fault] = []
        on_fault(faults.append)
        try:
            diagnosis = diagnose(RaisedEvidence(incident), GRAPH_RULES)
        finally:
            on_fault(None)
    assert not faults, faults[0].traceback
    return diagnosis


@pytest.mark.parametrize("case", cases())
def test_the_marked_line_is_blamed(case: Callable[[], None]) -> None:
    code, line = expected(case)

    diagnosis = diagnosed(case)

    place = diagnosis.cause_location
    assert place is not None
    assert (diagnosis.code, Path(place.file).name, place.line) == (code, f"{Path(inspect.getfile(case)).name}", line)
    if code != "TM900":
        assert diagnosis.treatments, "a diagnosis helps"
        assert not diagnosis.message.endswith(".")


def _pack_an_empty_sequence() -> None:
    lengths = torch.tensor([3, 0, 5])
    nn.utils.rnn.pack_padded_sequence(torch.rand(3, 5, 2), lengths, batch_first=True, enforce_sorted=False)


def test_a_sequence_goes_by_its_place_in_the_batch_and_not_by_that_among_sorted_ones() -> None:
    diagnosis = diagnosed(_pack_an_empty_sequence)

    assert diagnosis.message == "`pack_padded_sequence`: sequence 1 has length 0"
    assert [place.label for place in diagnosis.locations] == ["sequence 1 has length 0", "`lengths` is made here"]


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 2), nn.Linear(2, 2)


def _load_a_part() -> None:
    _Classifier().load_state_dict(nn.Linear(3, 2).state_dict())


def _load_another_model() -> None:
    _Classifier().load_state_dict(nn.LSTM(3, 2).state_dict())


def test_a_state_that_fits_nowhere_is_not_to_be_loaded_in_part() -> None:
    part, other = (diagnosed(case).treatments[0].title for case in (_load_a_part, _load_another_model))

    assert part == "load into that part: `model.encoder.load_state_dict(...)`"
    assert "strict" not in other


def _multiply_a_slice_of_doubles() -> None:
    rows = torch.rand(8, 4, dtype=torch.float64)
    nn.Linear(4, 2)(rows[2:6])


def test_a_slice_has_its_dtype_from_where_the_whole_is_made() -> None:
    labels = {place.label for place in diagnosed(_multiply_a_slice_of_doubles).locations}

    assert labels == {"float64, not float32", "`rows` becomes float64 here"}


COMPILED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(10, 2)

    def forward(self, x):
        x = self.conv(x).relu().mean((2, 3))
        return self.head(x)


model = torch.compile(Net(), backend="eager")
model(torch.randn(2, 3, 8, 8)).sum().backward()
"""


def test_code_under_torch_compile_is_blamed_though_it_has_no_frame(tmp_path: Path) -> None:
    diagnosis = run_script(tmp_path, COMPILED).only

    place = diagnosis.cause_location
    assert place is not None
    assert (diagnosis.code, place.line, place.code) == ("TM151", 14, "return self.head(x)")


WRAPPED = """
import torch
from torch import nn
from parts import Block, TrainingFailed


class Trainer:
    def __init__(self):
        self.model = nn.DataParallel(nn.Sequential(Block(3, 8), Block(4, 8)))

    def fit(self):
        try:
            self.model(torch.randn(2, 3, 8, 8)).sum().backward()
        except RuntimeError as error:
            raise TrainingFailed("no luck") from error


Trainer().fit()
"""
PARTS = """
from torch import nn


class TrainingFailed(Exception):
    pass


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x)
"""


def test_the_root_of_a_chain_is_found_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)

    finished = run_script(tmp_path, WRAPPED)

    diagnosis = finished.only
    place = diagnosis.cause_location
    assert place is not None
    assert (diagnosis.code, place.file, place.line) == ("TM152", "parts.py", 16)
    assert "8 channels where it takes 4" in diagnosis.message
    built = [place for place in diagnosis.locations if place.role == "origin"]
    assert [(place.file, place.code) for place in built] == [
        ("parts.py", "layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]")
    ]
    assert "TrainingFailed" in finished.stderr


LAST_BATCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self):
        self.loader = DataLoader(TensorDataset(torch.randn(10, 6)), batch_size=4)
        self.model = torch.nn.Linear(3, 1)

    def fit(self):
        for (batch,) in self.loader:
            self.step(batch)

    def step(self, batch):
        rows = batch.reshape(
            4,
            2,
            3,
        )
        self.model(rows).mean().backward()


Trainer().fit()
"""


def test_a_last_batch_that_is_not_full_is_named(tmp_path: Path) -> None:
    diagnosis = run_script(tmp_path, LAST_BATCH).only

    place = diagnosis.cause_location
    assert place is not None
    assert (diagnosis.code, place.line, place.column, place.end_column) == ("TM155", 16, 16, 30)
    assert any("2 samples, not 4" in fact for fact in diagnosis.evidence)
    assert [place.line for place in diagnosis.locations if place.role == "origin"] == [12]


DOUBLES = """
import numpy
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    table = numpy.random.default_rng(0).normal(size=(8, 3))
    def __len__(self):
        return 8
    def __getitem__(self, number):
        row = self.table[number]  # <- cause
        return row, row.sum() > 0

loader, model = DataLoader(Rows(), batch_size=4), torch.nn.Linear(3, 1)
for rows, labels in loader:
    model(rows).mean().backward()
"""


@pytest.mark.slow
def test_the_dataset_is_blamed_for_the_dtype_of_its_items(tmp_path: Path) -> None:
    diagnosis = run_script(tmp_path, DOUBLES).only

    place = diagnosis.cause_location
    assert place is not None
    assert (diagnosis.code, place.line) == ("TM160", marked_line(DOUBLES))


OWN_MISTAKES = [
    "raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)')",
    "raise ValueError('expected scalar type Float but found Double')",
    "{'lr': 1}['learning_rate']",
    "import numpy; numpy.zeros(3) + numpy.zeros(4)",
    "import numpy; numpy.concatenate([numpy.zeros((2, 3)), numpy.zeros((2, 4))])",
    "[1, 2][5]",
    "int('x')",
    "None.size()",
    "(1, 2).mean()",
    "len(3)",
    "assert torch.zeros(2).sum() > 1, 'size mismatch'",
]


@pytest.mark.parametrize("line", OWN_MISTAKES)
def test_mistakes_that_are_not_torchs_stay_unexplained(line: str) -> None:
    import torch

    def case() -> None:
        exec(line, {"torch": torch})

    assert diagnosed(case).code == "TM900"
