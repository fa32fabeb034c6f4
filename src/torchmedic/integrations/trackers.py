"""Experiment trackers that this process already uses: each gets a diagnosis as text, and a marker at its step.

Nothing leaves the machine: TensorBoard writes files, Weights & Biases counts only if its run is offline, and MLflow
only if its store and its artifacts are local files.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from torchmedic.contained import contained
from torchmedic.records import Diagnosis
from torchmedic.report import terminal

_TAG = "torchmedic"


@contained("integrations.trackers")
def tell(diagnosis: Diagnosis) -> None:
    """Tell every tracker that is in use of a diagnosis. Notes and plain exceptions are in the report only."""
    if diagnosis.severity == "note" or diagnosis.in_traceback:
        return
    text = _markdown(diagnosis)
    step = diagnosis.step or 0
    for name, send in _TRACKERS.items():
        if name in sys.modules:
            contained(f"integrations.trackers.{name}")(send)(sys.modules[name], diagnosis.code, text, step)


def _markdown(diagnosis: Diagnosis) -> str:
    frame = terminal.plain_frames(diagnosis)
    lines = [
        f"**{diagnosis.severity} {diagnosis.code}**: {diagnosis.message}",
        "",
        f"{diagnosis.grade}: {diagnosis.cause}",
    ]
    return "\n".join([*lines, *(["", "```", frame, "```"] if frame else [])])


def _to_tensorboard(module: Any, code: str, text: str, step: int) -> None:
    """Write to the event files of all living writers. A writer that is closed would open a new file."""
    writers = [each for each in gc.get_objects() if type(each) is module.SummaryWriter]
    for writer in writers:
        if writer.all_writers:
            writer.add_text(f"{_TAG}/{code}", text, step)
            writer.add_scalar(_TAG, 1, step)
            writer.flush()


def _to_wandb(module: Any, code: str, text: str, step: int) -> None:
    run = module.run
    if run is not None and run.offline:
        run.summary[f"{_TAG}/{code}"] = text
        run.log({_TAG: 1}, commit=False)


def _to_mlflow(module: Any, code: str, text: str, step: int) -> None:
    run = module.active_run()
    if run is None:
        return
    places = (module.get_tracking_uri(), run.info.artifact_uri)
    if all(_is_local(str(place)) for place in places):
        module.log_text(text, f"{_TAG}/{code}.md")
        module.log_metric(_TAG, 1, step=step)
        module.set_tag(_TAG, code)


def _is_local(place: str) -> bool:
    scheme, colon, _ = place.partition(":")
    return scheme in ("file", "sqlite") if colon else not place.startswith("databricks")


# By the module that a process has imported if it uses the tracker.
_TRACKERS: dict[str, Callable[[Any, str, str, int], None]] = {
    "torch.utils.tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}
