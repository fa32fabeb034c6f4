"""The names of `import torchmedic` are a promise: what is here stays."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchmedic

NAMES = {
    "Diagnosis",
    "Location",
    "Outcome",
    "Report",
    "Treatment",
    "Watch",
    "__version__",
    "assert_fits",
    "checkup",
    "diagnose",
    "explain",
    "predict",
    "recover",
    "watch",
}

SIGNATURES = {
    "assert_fits": (
        "(step: 'Callable[[], Any]', memory: 'str | int | None' = None, *, device_name: 'str' = '', "
        "seconds: 'float' = 60.0) -> 'Prediction'"
    ),
    "predict": (
        "(step: 'Callable[[], Any]', *, memory: 'str | int | None' = None, device_name: 'str' = '', "
        "seconds: 'float' = 60.0) -> 'Prediction'"
    ),
    "checkup": "(model: 'torch.nn.Module', batch: 'Any', loss_fn: 'Callable[..., torch.Tensor]') -> 'list[Diagnosis]'",
    "diagnose": "(error: BaseException) -> torchmedic.records.report.Diagnosis | None",
    "explain": "(code: 'str') -> 'str'",
    "recover": "(level: 'Level' = 'safe') -> 'Iterator[Recovered]'",
    "watch": (
        "(function: 'Callable[..., Any] | None' = None, /, *, output: 'str | None' = None, "
        "format: 'Format | None' = None, confidential: 'bool | None' = None, checkup: 'bool | None' = None, "
        "ignore: 'Iterable[str] | None' = None) -> 'Any'"
    ),
}

WITHOUT_TORCH = """
import sys
import torchmedic
from torchmedic.diagnose import registry
assert torchmedic.explain("division-by-zero").startswith("TM201 division-by-zero\\n\\n")
assert callable(torchmedic.diagnose) and torchmedic.diagnose.registry is registry
assert "torch" not in sys.modules and "IPython" not in sys.modules
"""


def test_the_names_are_those_of_the_documentation() -> None:
    assert set(torchmedic.__all__) == NAMES
    assert all(hasattr(torchmedic, name) for name in NAMES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_is_called_as_documented(name: str) -> None:
    assert str(inspect.signature(getattr(torchmedic, name))) == SIGNATURES[name]


def test_a_watch_has_a_run_and_diagnoses() -> None:
    assert {name for name in vars(torchmedic.Watch) if not name.startswith("_")} == {"run", "diagnoses", "begin"}


def test_reports_and_explanations_need_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_an_unknown_code_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="there is no diagnosis TM000"):
        torchmedic.explain("TM000")


def test_each_entry_point_leads_somewhere() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for points in project["entry-points"].values():
        for value in points.values():
            module, _, name = value.partition(":")
            spec = find_spec(module)
            assert spec is not None, value
            assert spec.origin is not None, value
            assert f"def {name}" in Path(spec.origin).read_text(), value
