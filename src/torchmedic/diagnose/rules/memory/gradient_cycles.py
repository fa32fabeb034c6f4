"""`backward(create_graph=True)` leaves reference cycles of leaf tensors and their gradients, which accumulate.

What: with `create_graph=True` the gradient that `backward` writes to `.grad` has its own graph, and that graph refers
back to the leaf to which the gradient belongs. The cycle is inside autograd, so Python's garbage collector does not
find it. Each step makes new leaves (an input with `requires_grad=True`, a new model), and all of them stay in memory,
with everything that their graphs have saved.

Why: a gradient penalty or a second derivative is computed with `.grad`.

Cure: compute gradients with `torch.autograd.grad(..., create_graph=True)`, which does not write to `.grad`; or set
`.grad` to None after use.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import end, measured
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.source.spots import Place


@rule("TM453", "gradient-cycles")
def check(evidence: LeakEvidence) -> Draft | None:
    growth = evidence.growth
    if growth.what != "cycles":
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"{growth.held.size} tensors and their gradients keep each other alive, with more in every step"
    draft.cause = "their `.grad` has a graph that leads back to themselves, which the garbage collector does not see"
    where = Place(growth.held.file, growth.held.local)
    draft.at(evidence.at_call("cause", where, "backward", "with `create_graph=True` this writes a graph to `.grad`"))
    draft.because(
        f"there were more at every look from step {growth.first.step} to step {growth.last.step}, "
        f"{growth.rate:.1f} per step",
        measured(evidence),
        end(evidence),
    )
    draft.help("compute these gradients with `torch.autograd.grad(..., create_graph=True)`, which writes to no `.grad`")
    draft.help("or set `.grad` of these tensors to None at the end of the step")
    return draft.rated("warning")
