"""An optimizer holds the parameters of a layer that no code uses, or whose result no code reads.

What: a layer is built and registered, its parameters are in the optimizer, and they never get a gradient. Either no
line of the script uses it again, or the line that calls it assigns the result to a variable that is never read.

Why: often a later line uses the wrong variable (`self.head(hidden)` for `self.head(mixed)`), or a layer was left over
when the forward pass was rewritten. The loss does not depend on the layer, so it cannot learn, and no error is raised.

Cure: use the result of the layer, or remove the layer.
"""

from __future__ import annotations

import ast
import os

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.checkup._discarded_sums import discarded_sum
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.records import Grade, Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_node
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.lookup.unread_results import INDIRECT_READS, unread_result
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees


@rule("TM637", "unused-layer")
def check(evidence: CheckUp) -> Draft | None:
    unreached = evidence.unreached
    if unreached is None or not unreached.cuts.done:
        return None
    missing = [
        tensor for found in unreached.missing if not found.is_written() and (tensor := found.reference()) is not None
    ]
    cut_off = frozenset[int]().union(*(cut.behind for cut in unreached.cuts.cuts))
    for tensor in missing:
        if id(tensor) in cut_off:
            continue
        for model, name, layer in evidence.owners(tensor):
            around = [module for module in model.modules() if any(part is layer for part in module.modules())]
            unread = next((found for module in around if (found := _result_unread(evidence, module))), None)
            found = unread or _never_named(model, name)
            if found is not None:
                return _diagnosis(evidence, tensor, *found)
    called = [tensor for tensor in missing if id(tensor) not in cut_off and _is_called(evidence, tensor)]
    discarded = discarded_sum() if called else None
    if discarded is not None:
        return _diagnosis(evidence, called[0], discarded, "a sum with its result is computed and thrown away", "likely")
    return None


def _is_called(evidence: CheckUp, tensor: torch.Tensor) -> bool:
    """Whether the layer of a parameter has computed something."""
    cuts = evidence.unreached.cuts if evidence.unreached is not None else None
    found = [cuts.call_of(layer) for _, _, layer in evidence.owners(tensor)] if cuts is not None else []
    return any(call is not None and call.with_gradient for call in found)


def _result_unread(evidence: CheckUp, layer: torch.nn.Module) -> tuple[Location, str] | None:
    """The line that calls a layer and puts what it gives into a variable that nothing in its function reads."""
    called = evidence.unreached.cuts.call_of(layer) if evidence.unreached is not None else None
    if called is None or not called.once or not called.with_gradient or not called.sites or layer._forward_hooks:
        return None  # a hook may take the result
    spot = spot_of(called.sites[0])
    unread = unread_result(spot.file, spot.line)
    if unread is None:
        return None
    statement, name = unread
    place = node_location("cause", spot.file, statement, f"`{name}` is never read")
    return place, f"its result is put into `{name}`, which nothing reads"


def _never_named(model: torch.nn.Module, name: str) -> tuple[Location, str] | None:
    """The only line of all the user's files that names the attribute: the one that builds the layer."""
    holders: list[tuple[torch.nn.Module, str]] = []
    owner: torch.nn.Module | None = model
    for part in name.split(".")[:-1]:
        written = class_node(type(owner)) if owner is not None else None
        if owner is not None and written is not None and is_user_file(written[0]):
            holders.append((owner, part))
        owner = owner._modules.get(part) if owner is not None else None
    if not holders:
        return None
    holder, attribute = holders[-1]
    built = list(attribute_assignments(type(holder), attribute))
    if len(built) != 1 or not is_user_file(built[0][0]) or _is_named(attribute, built[0][0]):
        return None
    return node_location(
        "cause", *built[0], "built here, and named nowhere else"
    ), "no line names it after it was built"


def _is_named(attribute: str, beside: str) -> bool:
    """Whether some line of the project reads an attribute of this name, or may use layers without naming them."""
    home = os.path.dirname(os.path.abspath(beside)) + os.sep
    for file, tree in user_trees():
        folder = os.path.dirname(os.path.abspath(file)) + os.sep
        if not (folder.startswith(home) or home.startswith(folder)):
            continue  # another project's
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=attr, ctx=context):
                    if attr in INDIRECT_READS or (attr == attribute and not isinstance(context, ast.Store)):
                        return True
                case ast.Name(id=name) if name in INDIRECT_READS:
                    return True
                case ast.Constant(value=str(text)) if text == attribute:
                    return True
    return False


def _diagnosis(evidence: CheckUp, tensor: torch.Tensor, place: Location, why: str, grade: Grade = "proven") -> Draft:
    steps = evidence.unreached.steps if evidence.unreached is not None else 0
    name = evidence.name_of(tensor)
    layer = f"`{name.rpartition('.')[0] or name}`"
    draft = check.draft(
        evidence, grade, f"the layer {layer} is in the optimizer, and the loss does not depend on it", why
    )
    draft.at(place)
    draft.because(f"no gradient in {steps} steps: `{name}`")
    is_sum = grade == "likely"
    draft.help(
        "assign the sum to the loss that backward is called on" if is_sum else "use its result, or remove the layer"
    )
    return draft.about(step=steps).rated("warning")
