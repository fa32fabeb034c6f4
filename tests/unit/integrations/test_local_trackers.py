"""Nothing leaves the machine: a tracker that sends what it is given to a server is told nothing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchmedic.integrations import trackers
from torchmedic.records import Diagnosis

FOUND = Diagnosis(code="TM201", name="division-by-zero", grade="proven", message="m", cause="c", step=7)


def _wandb(offline: bool) -> tuple[Any, dict[str, Any]]:
    told: dict[str, Any] = {}
    run = SimpleNamespace(offline=offline, summary=told, log=lambda values, **_: told.update(values))
    return SimpleNamespace(run=run), told


def _mlflow(store: str, artifacts: str) -> tuple[Any, list[Any]]:
    told: list[Any] = []
    module = SimpleNamespace(
        active_run=lambda: SimpleNamespace(info=SimpleNamespace(artifact_uri=artifacts)),
        get_tracking_uri=lambda: store,
        log_text=lambda text, path: told.append(path),
        log_metric=lambda name, value, step: told.append((name, step)),
        set_tag=lambda name, value: told.append(value),
    )
    return module, told


@pytest.mark.parametrize(("offline", "keys"), [(True, {"torchmedic/TM201", "torchmedic"}), (False, set())])
def test_only_an_offline_run_of_wandb_is_told(monkeypatch: pytest.MonkeyPatch, offline: bool, keys: set[str]) -> None:
    module, told = _wandb(offline)
    monkeypatch.setitem(sys.modules, "wandb", module)

    trackers.tell(FOUND)

    assert set(told) == keys


@pytest.mark.parametrize(
    ("store", "artifacts", "is_told"),
    [
        ("sqlite:///mlflow.db", "/home/user/mlruns/0", True),
        ("file:///tmp/mlruns", "file:///tmp/mlruns/0", True),
        ("mlruns", "./mlruns/0", True),
        ("http://localhost:5000", "mlflow-artifacts:/0", False),
        ("databricks", "dbfs:/databricks/0", False),
        ("sqlite:///mlflow.db", "s3://bucket/0", False),
    ],
)
def test_only_a_local_store_of_mlflow_is_told(
    monkeypatch: pytest.MonkeyPatch, store: str, artifacts: str, is_told: bool
) -> None:
    module, told = _mlflow(store, artifacts)
    monkeypatch.setitem(sys.modules, "mlflow", module)

    trackers.tell(FOUND)

    assert told == (["torchmedic/TM201.md", ("torchmedic", 7), "TM201"] if is_told else [])


def test_a_module_without_a_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # half imported, say
    trackers.tell(FOUND)
