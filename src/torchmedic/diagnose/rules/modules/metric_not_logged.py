"""A callback or a scheduler was told to watch a metric that nothing has logged.

What: early stopping, the choice of the best checkpoint and `ReduceLROnPlateau` of a Trainer look up a metric by its
name. No metric of this name was there when the metric was needed.

Why: the metric is logged under another name (`valid_loss`, `val/loss`), it is logged in training only, or the function
that computes the metrics does not return it.

Cure: use one name in both places.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import user_trees

_MAX_SHOWN = 12
_PREFIX = "eval_"  # a Trainer puts it before each metric of an evaluation


@rule("TM182", "metric-not-logged")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is None or frame.is_user or frame.instruction != "RAISE_VARARGS":
        return None
    metrics = _metrics(frame)
    wanted = [
        name for name in _names(frame) if metrics is not None and name not in metrics and name in evidence.message
    ]
    if metrics is None or not wanted:
        return None
    name, known = wanted[0], [each for each in metrics if isinstance(each, str)]
    draft = check.draft(evidence, "proven")
    draft.message = f"the metric `{name}` is to be watched, and nothing has logged it"
    shown = listed([f"`{each}`" for each in known], _MAX_SHOWN) if known else "no metric at all"
    draft.cause = f"logged so far: {shown}"
    asked = _asked_for(name)
    draft.at(asked, *evidence.at_user_line("surfaced" if asked is not None else "cause", f"looks for `{name}`"))
    close = difflib.get_close_matches(name, known, n=1)
    return draft.help(f"watch `{close[0]}`" if close else f"log `{name}`, or watch a metric that is logged")


def _metrics(frame: Frame) -> Mapping[Any, Any] | None:
    """The metrics that are known where a library gave up: its own variable, or those of its trainer."""
    own = frame.variables.get("metrics", frame.variables.get("logs"))
    owner = frame.variables.get("trainer") or getattr(frame.variables.get("self"), "trainer", None)
    found = own if isinstance(own, Mapping) else getattr(owner, "callback_metrics", None)
    return found if isinstance(found, Mapping) else None


def _names(frame: Frame) -> Iterator[str]:
    """What the library looked for: `monitor_key`, `metric_to_check`, or the attribute `monitor` of a callback."""
    values = [frame.variables.get(name) for name in ("monitor_key", "metric_to_check", "monitor")]
    values.append(getattr(frame.variables.get("self"), "monitor", None))
    yield from (value for value in values if isinstance(value, str) and value)


def _asked_for(name: str) -> Location | None:
    """The only text of the user's that is the name of a metric which is to be watched."""
    texts = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Constant) and node.value in (name, name.removeprefix(_PREFIX))
    ]
    return node_location("cause", *texts[0], "no metric of this name is logged") if len(texts) == 1 else None
