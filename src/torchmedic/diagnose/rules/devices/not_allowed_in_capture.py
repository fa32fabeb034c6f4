"""An operation is not allowed while a CUDA graph is captured.

What: `torch.cuda.graph` records the kernels that the code starts, and runs none of them. What needs a result on the
host, waits for the device, or uses another stream in between ends the capture with an error. The capture then fails at
its end as well, and that second error is the one that Python shows last.

Why: `.item()`, `.cpu()`, `print` of a tensor, `if` on a tensor, `nonzero`, a mask as an index or `synchronize()` in the
captured code; a first call that sets up a library; an optimizer that keeps its step count on the host.

Cure: leave such calls out of the captured code and read results after `graph.replay()`, run some steps on a side stream
before the capture, and build the optimizer with `capturable=True`.
"""

from __future__ import annotations

import ast

from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in, innermost
from torchmedic.source.user_variables import user_trees

_WITH = ast.With | ast.AsyncWith
_WAITS = frozenset("item cpu numpy tolist synchronize nonzero unique masked_select __bool__ __float__ __int__".split())


@rule("TM323", "not-allowed-in-capture")
def check(evidence: RaisedEvidence) -> Draft | None:
    if evidence.says("capturable is false"):
        return _not_capturable(evidence)
    fault = device_fault_of(evidence.error)
    if fault is None or fault.kind != "capture":
        return None
    draft = check.draft(evidence, "proven", cause=fault.words)
    op = evidence.calls[0].op.strip("_") if evidence.calls else ""
    waits = any(call.op in _WAITS for call in evidence.calls)
    draft.message = f"{f'`{op}`' if op else 'this call'} is not allowed while a CUDA graph is captured"
    draft.at(*raised_at(evidence, "waits for a result, which a capture does not compute" if waits else "refused here"))
    draft.at(_begin(evidence))
    if waits:
        return draft.help("leave it out of the captured code, and read the value after `graph.replay()`")
    return draft.help(
        "leave it out of the captured code, or run the code some times on a side stream before the capture"
    )


def _not_capturable(evidence: RaisedEvidence) -> Draft:
    frames = [frame for frame in evidence.library_frames if hasattr(frame.variables.get("self"), "param_groups")]
    kind = type(frames[-1].variables["self"]).__name__ if frames else "optimizer"
    made = [(file, call) for file, tree in user_trees() for call in calls_in(tree, kind)]
    draft = check.draft(evidence, "proven", f"`{kind}` was built without `capturable=True`, and its step is captured")
    draft.cause = "its step count lies on the host, where a replay of the graph does not change it"
    draft.at(node_location("cause", *made[0], "built without `capturable=True`") if len(made) == 1 else None)
    draft.at(*evidence.at_user_line("surfaced" if draft.has_place else "cause", "captured here"))
    return draft.at(_begin(evidence)).help("build the optimizer with `capturable=True`")


def _begin(evidence: RaisedEvidence) -> Location | None:
    """The `with` statement of the capture, where the frames that run stand in one."""
    for frame in reversed(evidence.frames):
        found = innermost(frame.tree, frame.line, _WITH) if frame.is_user else None
        for item in found.items if isinstance(found, _WITH) else ():
            if isinstance(item.context_expr, ast.Call) and "graph" in ast.unparse(item.context_expr.func).lower():
                return node_location("origin", frame.file, item.context_expr, "the capture begins here")
    return None
