"""`torch.compile(fullgraph=True)` met a line that it cannot take into one graph.

What: `torch.compile` turns a function into graphs. At a line that it cannot follow it ends the graph, runs the line in
Python, and begins another graph. With `fullgraph=True` there may be one graph only, so that such a line is an error.

Why: the line branches on the value of a tensor, reads a value (`.item()`, `.numpy()`), prints, or calls a library that
the compiler does not know.

Cure: write the line with tensor operations (`torch.where`, `torch.clamp`), move it out of the compiled function, or
leave out `fullgraph=True`: the parts before and after the line are then compiled on their own.
"""

from __future__ import annotations

import ast
import re

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees

_PART = re.compile(r"^\s*(Explanation|Hint): (.+)$", re.MULTILINE)
_GENERAL = ("is fundamental", "report an issue", "may have an open issue")  # hints that name no change
_MAX_HINTS = 2
_MESSAGE = "`torch.compile(fullgraph=True)` cannot put this line into its graph"
_CURE = "write the line with tensor operations, move it out of the compiled function, or leave out `fullgraph=True`"


@rule("TM127", "unfit-for-full-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.is_traced:
        return None
    if _is_guard_on_data(evidence.error):
        return _branching(evidence)
    if "Unsupported" not in evidence.kinds:
        return None
    reason = evidence.message.strip().splitlines()[0].rstrip(".")
    parts = _PART.findall(evidence.message)
    explained = next((text for kind, text in parts if kind == "Explanation"), reason)
    hints = [text for kind, text in parts if kind == "Hint" and not any(each in text for each in _GENERAL)]
    draft = check.draft(evidence, "proven", _MESSAGE)
    draft.cause = f"torch.compile: {explained}"
    draft.at(*evidence.at_user_line("cause", reason[:1].lower() + reason[1:]))
    draft.at(_asked())
    for hint in hints[:_MAX_HINTS]:
        draft.because(f"torch.compile advises: {hint}")
    return draft.help(_CURE)


def _is_guard_on_data(error: BaseException) -> bool:
    """Whether the compiler was asked to decide about a number that it does not know: one read out of a tensor."""
    inner = error.__cause__ or error.__context__
    return any(type(each).__name__ == "GuardOnDataDependentSymNode" for each in (error, inner))


def _branching(evidence: RaisedEvidence) -> Draft:
    draft = check.draft(evidence, "proven", _MESSAGE)
    draft.cause = "what happens next depends on a number that is read out of a tensor, and is not known when compiling"
    return draft.at(*evidence.at_user_line("cause", "depends on the value of a tensor"), _asked()).help(_CURE)


def _asked() -> Location | None:
    """Where the user asks for one graph, if there is one such place."""
    found = [
        (file, keyword.value)
        for file, tree in user_trees()
        for call in calls_in(tree)
        for keyword in call.keywords
        if keyword.arg == "fullgraph" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
    ]
    return node_location("origin", *found[0], "one graph is asked for here") if len(found) == 1 else None
