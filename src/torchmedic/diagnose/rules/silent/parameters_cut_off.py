"""An optimizer holds parameters that the loss never reaches: what they compute is cut off from it.

What: these parameters require a gradient, are used in the forward pass, and had none in any step. What they compute leaves
the graph on its way to the loss: by `detach()`, `.data`, `numpy()`, `tolist()` or `argmax()`.

Why: autograd goes back only through what it has recorded. Behind a cut nothing gets a gradient; the optimizer passes over
such parameters without a word, and they keep the values with which they began. The rest of the model may well learn,
so that the loss falls all the same.

Cure: take the cut away, if these parameters are to learn. If they are not, say so where it can be seen: freeze them with
`requires_grad_(False)` and leave them out of the optimizer.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe.graph_cuts import Cut
from torchmedic.records import Diagnosis
from torchmedic.replay.check_up import CheckUp, spot_of

CODE, NAME = "TM631", "parameters-cut-off"
_HOW = {"data": "`.data`", "detach_": "`detach_()`", "detach": "`detach()`"}


def check(evidence: CheckUp) -> Diagnosis | None:
    unreached = evidence.unreached
    if unreached is None:
        return None
    written = [found for found in unreached.missing if found.is_written()]
    missing = {id(tensor): tensor for found in unreached.missing if (tensor := found.reference()) is not None}
    for found in written:
        missing.pop(id(found.reference()), None)  # a moving average, say, that needs no gradient
    for cut in unreached.cuts.cuts:
        lost = [tensor for key, tensor in missing.items() if key in cut.behind]
        if lost and cut.sites and not _is_copy_of_other(evidence, lost, missing):
            return _diagnosis(evidence, cut, lost, unreached.steps)
    return None


def _is_copy_of_other(evidence: CheckUp, lost: list[torch.Tensor], missing: dict[int, torch.Tensor]) -> bool:
    """Whether a module with these parameters has a twin that is trained: a target network, synchronised now and then."""
    wanted = {id(tensor) for tensor in lost}
    modules = [module for model in evidence.models for module in model.modules()]
    modules += evidence.models
    shapes = {id(module): [tuple(tensor.shape) for tensor in module.parameters()] for module in modules}
    for module in modules:
        own = [id(tensor) for tensor in module.parameters()]
        if not own or not wanted.issubset(own) or not all(key in missing for key in own):
            continue
        for other in modules:
            trained = not any(id(tensor) in missing for tensor in other.parameters())
            if other is not module and trained and type(other) is type(module):
                if shapes[id(other)] == shapes[id(module)] and len(own) > 1 and _is_whole(module):
                    return True
    return False


def _is_whole(module: torch.nn.Module) -> bool:
    """A network, not a single layer: two layers of the same size are no twins."""
    return any(True for _ in module.children())


def _diagnosis(evidence: CheckUp, cut: Cut, lost: list[torch.Tensor], steps: int) -> Diagnosis:
    names = [name for tensor in lost if (name := evidence.name_of(tensor))]
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    how = _HOW.get(cut.name, f"`{cut.name}()`")
    count = len(lost)
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"{count} parameter{'s' if count > 1 else ''} of the optimizer {'are' if count > 1 else 'is'} cut off from the loss",
        f"{how} drops the graph of what {'they compute' if count > 1 else 'it computes'}, and no other way leads to the loss",
    )
    draft.at(spot_of(cut.sites[0]).location("cause", "the graph ends here"))
    draft.because(f"no gradient in {steps} steps: {shown}" if shown else f"no gradient in {steps} steps")
    draft.help(f"remove {how} if these parameters are to learn; else leave them out of the optimizer")
    return draft.done(step=steps, rank=evidence.rank, severity="warning")


RULE = Rule(CODE, NAME, check)
