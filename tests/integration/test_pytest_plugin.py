"""`pytest --torchmedic`, in a pytest of its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest
import torch
from torch import nn


def test_fails_in_a_step():
    h = torch.sigmoid(nn.Linear(4, 4)(torch.randn(2, 4)))
    h += 1
    h.sum().backward()


def test_asserts_about_a_number():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        x = torch.randn(2, 4)
        x[0] *= step != 4
        optimizer.zero_grad()
        loss = (model(x) / x.norm(dim=1, keepdim=True)).square().mean()
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()


def test_plain_failure():
    assert 1 == 2


def test_expected_failure():
    with pytest.raises(RuntimeError):
        nn.Linear(4, 4)(torch.randn(2, 5))


def test_healthy():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()


BATCH = torch.randn(8, 4), torch.randint(0, 3, (8,))
TWICE = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))


def test_checkup_finds(checkup):
    checkup(TWICE, BATCH, nn.CrossEntropyLoss())


def test_checkup_is_content(checkup):
    checkup(nn.Linear(4, 3), BATCH, nn.CrossEntropyLoss())
    checkup(TWICE, BATCH, nn.CrossEntropyLoss(), ignore=["TM633"])
"""

WITHOUT = """
import sys


def test_nothing_is_loaded():
    assert "torch" not in sys.modules and "torchmedic.integrations.session" not in sys.modules
    assert False
"""


def _run(pytester: pytest.Pytester, *arguments: str) -> str:
    # By its entry point where this checkout is installed; alone, as pytest rewrites the asserts of all that it loads.
    installed = any(each.name == "torchmedic" for each in entry_points(group="pytest11"))
    plugin = ("-p", "torchmedic" if installed else "torchmedic.integrations.pytest_plugin")
    options = ("--disable-plugin-autoload", *plugin, "-p", "no:cacheprovider")
    done = pytester.runpytest_subprocess(*options, *arguments)
    return done.stdout.str()


def _sections(output: str) -> dict[str, str]:
    """The report of each failed test, by its name."""
    parts = output.split("\n___")
    return {part.strip("_ ").split(" ", 1)[0]: part for part in parts[1:]}


def test_a_failing_step_has_its_diagnosis_as_a_section(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_train=TESTS)
    output = _run(pytester, "--torchmedic")

    assert "4 failed, 3 passed" in output, output
    failed = _sections(output)
    assert "- torchmedic -" in failed["test_fails_in_a_step"]
    assert "error[TM102]" in failed["test_fails_in_a_step"]
    assert "error[TM201]" in failed["test_asserts_about_a_number"]
    assert "step 4, row 0" in failed["test_asserts_about_a_number"]
    assert "warning[TM633]" in failed["test_checkup_finds"]
    assert "torchmedic" not in failed["test_plain_failure"]
    assert len(list((Path(pytester.path) / ".torchmedic").glob("*-pytest"))) == 1


def test_it_does_nothing_without_the_option_or_without_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_without=WITHOUT)

    for options in ((), ("--torchmedic",)):
        output = _run(pytester, *options)
        assert "assert False" in output
        assert "- torchmedic -" not in output
    assert not (Path(pytester.path) / ".torchmedic").exists()
