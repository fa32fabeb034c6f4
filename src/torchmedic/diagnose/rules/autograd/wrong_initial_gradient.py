"""The initial gradient has a different shape from the tensor on which `backward` was called.

What: `out.backward(gradient)` and `autograd.grad(out, ..., grad_outputs=gradient)` weight every element of `out`, so
the gradient must have the shape of `out`.

Why: `torch.ones(batch)` for an output of shape `[batch, 1]`, or weights of another layout.

Cure: pass `torch.ones_like(out)`, or reduce the output to one number and pass no gradient.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.diagnose.cures.edits import Candidate, rewritten
from torchmedic.diagnose.cures.graph_edits import call_at
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.trial import Edit
from torchmedic.source.live_frames import Frame
from torchmedic.source.spots import spot_of_node, spot_of_traced

_MESSAGE = re.compile(
    r"Mismatch in shape: grad_output\[(\d+)\] has a shape of torch\.Size\(\[([\d, ]*)\]\) "
    r"and output\[(\d+)\] has a shape of torch\.Size\(\[([\d, ]*)\]\)"
)


@rule("TM125", "wrong-initial-gradient")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _MESSAGE.search(evidence.message)
    if found is None or "RuntimeError" not in evidence.kinds:
        return None
    given, wanted = f"[{found[2]}]", f"[{found[4]}]"
    draft = check.draft(evidence, "proven")
    draft.message = f"backward was started with a gradient of shape {given} for an output of shape {wanted}"
    draft.cause = "every element of the output is weighed by one of the gradient"
    draft.at(*evidence.at_user_line("cause", f"{given} for {wanted}"))
    frame = evidence.user_frame
    treated = None
    if frame is not None:
        treated = GraphTrials(StepFailure(evidence)).first(_alike(frame), same_loss=False)
    return draft.treat(
        treated,
        otherwise="give the gradient the shape of the output, or reduce the output to one number and pass nothing",
    )


def _alike(frame: Frame) -> Iterator[Candidate]:
    """`torch.ones(...)` becomes `torch.ones_like(output)`."""
    call = call_at(spot_of_traced(frame), "backward", "grad")
    if call is None or not isinstance(call.func, ast.Attribute):
        return
    words = {word.arg: word.value for word in call.keywords}
    if call.func.attr == "backward":
        output: ast.expr | None = call.func.value
        gradient = words.get("gradient") or (call.args[0] if call.args else None)
    else:
        output = words.get("outputs") or (call.args[0] if call.args else None)
        gradient = words.get("grad_outputs") or (call.args[2] if len(call.args) > 2 else None)
    if output is None or not isinstance(gradient, ast.Call) or ast.unparse(gradient.func) != "torch.ones":
        return
    text = f"torch.ones_like({rewritten(frame.file, output)})"
    yield "weigh every element of the output alike", Edit(spot_of_node(frame.file, gradient, frame.function), text)
