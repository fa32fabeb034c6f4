"""Notebooks, executed by a real kernel."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from running import clean_environment

CELLS = """
%load_ext torchmedic
import torch
from torch import nn
backward = torch.autograd._engine_run_backward
---
def step(model, x):
    h = torch.sigmoid(model(x))
    h += 1
    return h.square().mean()
---
%%torchmedic
loss = step(nn.Linear(4, 4), torch.randn(8, 4))
loss.backward()
---
print(torch.autograd._engine_run_backward is backward)
---
%torchmedic on
---
def train(bad=-1):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        x[2] *= index != bad
        loss = (model(x) / x.norm(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
---
train(bad=3)
---
train()
---
torch.ones(2) + torch.ones(3)
---
%torchmedic off
---
torch.ones(2) + torch.ones(3)
---
import torchmedic
try:
    nn.Linear(4, 4)(torch.ones(2, 5))
except RuntimeError as error:
    found = torchmedic.diagnose(error)
found
---
%unload_ext torchmedic
%torchmedic on
""".strip().split("\n---\n")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter
        client = nbclient.NotebookClient(notebook, timeout=200, allow_errors=True)
        client.execute(cwd=str(folder), env=clean_environment())
    return [cell.outputs for cell in notebook.cells]


def _shown(outputs: list[Any]) -> list[tuple[str, str]]:
    """What a cell displays, as text and as HTML."""
    found = [each for each in outputs if each.output_type in ("display_data", "execute_result")]
    return [(each.data["text/plain"], each.data.get("text/html", "")) for each in found]


def test_a_failing_cell_is_explained_below_its_traceback(outputs: list[list[Any]]) -> None:
    assert [each.output_type for each in outputs[2]] == ["error", "display_data"]
    ((text, html),) = _shown(outputs[2])
    assert text.startswith("error[TM102]")
    assert "--> cell [2], line 3\n" in text
    assert "::: cell [3], line 3\n" in text  # counted with the line of the magic
    assert "[proven on your step" in text
    assert "cell [2], line 3" in html
    assert "<script" not in html
    assert not re.search(r"ipykernel|ipython-input", text + html)


def test_the_kernel_lives_and_torch_is_as_it_was(outputs: list[list[Any]]) -> None:
    assert outputs[3][0].text == "True\n"


def test_no_thread_of_the_kernel_is_disturbed(outputs: list[list[Any]]) -> None:
    """A replay puts back what it changes in Python, and must not put back what the threads of the kernel change."""
    said = [each.text for cell in outputs[:-1] for each in cell if each.output_type == "stream"]
    assert said == ["True\n"]


def test_on_watches_all_cells_that_follow_until_off(outputs: list[list[Any]]) -> None:
    ((text, _),) = _shown(outputs[6])
    assert text.startswith("error[TM201]"), text
    assert "--> cell [6], line 8\n" in text
    assert "first non-finite value, step 3, row 2" in text
    assert outputs[7] == []  # healthy
    ((text, _),) = _shown(outputs[8])
    assert "--> cell [9], line 1\n" in text
    assert [each.output_type for each in outputs[10]] == ["error"]


def test_a_diagnosis_is_shown_as_html(outputs: list[list[Any]]) -> None:
    ((text, html),) = _shown(outputs[11])
    assert text.startswith("error[TM151]")
    assert html.startswith("<div")


def test_it_can_be_unloaded(outputs: list[list[Any]]) -> None:
    assert "torchmedic" in outputs[12][0].get("text", "") + str(outputs[12][0].get("evalue", ""))
