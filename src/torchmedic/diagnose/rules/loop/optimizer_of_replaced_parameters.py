"""The optimizer holds parameters that the model no longer uses, and not the parameters that replaced them.

What: the optimizer was built from the parameters that the model had at that time. A layer that was replaced later, or a
model that was built or copied again, has other parameters. They get gradients, but no update changes them.

Why: `optimizer = ...(model.parameters())` comes before `model.head = ...`, or before the model was built again.

Or the losses are computed with a copy of the model (`copy.deepcopy`), as in the inner loop of meta-learning: the
gradients of the copy do not come back to the model.

Cure: build the optimizer after the last change to the model, or add the new parameters with `add_param_group`.
"""

from __future__ import annotations

import ast

import msgspec

from torchmedic.detect.loop.incident import (
    OptimizerOfOriginal,
    OptimizerOfOtherModel,
    OptimizerOfTwin,
    ReplacedParameters,
)
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, calls_in, has_line, nodes_in, syntax_tree
from torchmedic.source.user_variables import user_trees

_SHARDING = ("fully_shard", "FullyShardedDataParallel", "FSDP", "parallelize_module")


@rule("TM608", "optimizer-of-replaced-parameters")
def check(evidence: LoopEvidence) -> Draft | None:
    incident = evidence.incident
    if isinstance(incident, OptimizerOfTwin):
        return _twin(evidence, incident)
    if isinstance(incident, ReplacedParameters):
        return _layer(evidence, incident)
    if isinstance(incident, OptimizerOfOtherModel):
        return _model(evidence, incident)
    if isinstance(incident, OptimizerOfOriginal):
        return _original(evidence, incident)
    return None


def _layer(evidence: LoopEvidence, incident: ReplacedParameters) -> Draft:
    names = listed([f"`{name}`" for name in incident.names])
    draft = check.draft(evidence, "proven")
    draft.message = f"{names} are not trained: the optimizer still holds the parameters that they replaced"
    draft.cause = "the optimizer was built before these parameters took the place of others"
    replaced = _assigned(evidence, incident.names, "the parameters are replaced here")
    draft.at(*_places(evidence, "takes the parameters that the model has at this moment", replaced))
    draft.because(
        f"the loss reaches {names} ({count(incident.elements, 'weight')}), which are in no optimizer and do not change",
        f"the optimizer holds {count(len(incident.old), 'tensor')} that no model uses and that never get a gradient, "
        f"of shape {listed([str(shape) for shape in incident.old])}",
    )
    return draft.help("build the optimizer after the model is complete", safety="changes-training")


def _twin(evidence: LoopEvidence, incident: OptimizerOfTwin) -> Draft:
    names = f"{count(len(incident.old), 'parameter')} ({listed([f'`{name}`' for name in incident.names])})"
    draft = check.draft(evidence, "likely")
    draft.message = f"{names} get gradients and no update: the optimizer holds another model of the same shapes instead"
    draft.cause = "the optimizer was given a copy of the model, which no loss reaches"
    draft.at(evidence.at("cause", incident.cause, "holds the parameters of the copy"))
    draft.because(
        f"the loss reaches {count(incident.elements, 'weight')} that are in no optimizer and do not change",
        f"{count(len(incident.old), 'parameter')} of the optimizer never got a gradient",
    )
    return draft.help("give the optimizer the parameters of the model that is trained", safety="changes-training")


def _original(evidence: LoopEvidence, incident: OptimizerOfOriginal) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "the optimizer changes nothing: the losses are computed with copies of its model"
    draft.cause = "gradients are computed for the copies, and none of them comes back to the model itself"
    draft.at(
        evidence.at("cause", incident.cause, "a copy with parameters of its own", "deepcopy"),
        evidence.at("surfaced", incident.update, "finds no gradient", "step"),
    )
    draft.because(
        f"{count(incident.updates, 'update')} had no gradient for any of {count(incident.held, 'parameter')}",
        "the losses reached parameters of the same shapes, which are gone",
    )
    draft.help("compute updated weights from those of the model: `torch.func.functional_call` with `p - rate * grad`")
    return draft.help("or give the gradients of the copy to the model before `step()`, as first-order MAML does")


def _model(evidence: LoopEvidence, incident: OptimizerOfOtherModel) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "the weights do not change: the optimizer holds the parameters of another model"
    sharded = _sharded(evidence)
    if sharded is not None:
        draft.message = (
            "the weights do not change: the optimizer holds the parameters from before the model was sharded"
        )
    draft.cause = "not one parameter that the loss reaches is in an optimizer that steps, and not one in it is reached"
    label = f"its {count(incident.held, 'parameter')} are not in what is trained"
    draft.at(
        *_places(
            evidence, label, sharded or _rebound(evidence, "another model takes the place of the one that was trained")
        ),
        evidence.at("origin", incident.forward, "the loss is computed with another model here"),
        evidence.at("surfaced", incident.update, "finds no gradient", "step"),
    )
    if incident.forward is not None:
        draft.help("compute the loss with the model whose parameters the optimizer has", safety="changes-training")
    draft.because(
        f"the loss reaches {count(incident.reached, 'other parameter')} ({count(incident.elements, 'weight')}), which "
        "did not change",
        f"{count(incident.updates, 'update')} had no gradient to apply",
    )
    if sharded is not None:
        return draft.help("build the optimizer after the model is sharded", safety="changes-training")
    return draft.help("build the optimizer from the parameters of the model that is trained", safety="changes-training")


def _sharded(evidence: LoopEvidence) -> Location | None:
    """The first call below the optimizer's line that gives a model sharded parameters in place of its own."""
    built = evidence.incident.cause
    helpers = {
        function.name
        for file, tree in user_trees()
        for function in nodes_in(tree)
        if isinstance(function, FUNCTIONS) and any(calls_in(function, *_SHARDING))
        if file != built.file or not has_line(function, built.line)
    }
    tree = syntax_tree(built.file)
    calls = (call for call in calls_in(tree, *_SHARDING, *helpers) if call.lineno > built.line)
    first = min(calls, key=lambda call: call.lineno, default=None)
    label = "the model gets other parameters here"
    return node_location("writer", built.file, first, label) if first is not None else None


def _places(evidence: LoopEvidence, label: str, replaced: Location | None) -> list[Location | None]:
    """The line that builds the optimizer, and the replacement, which is the cause where training was right before."""
    built = evidence.at("cause", evidence.incident.cause, label)
    if not evidence.habits.reach.since or replaced is None or built is None:
        return [built, replaced]
    return [msgspec.structs.replace(replaced, role="cause"), msgspec.structs.replace(built, role="origin")]


def _rebound(evidence: LoopEvidence, label: str) -> Location | None:
    """The assignment, below the optimizer's line, to the variable whose parameters the optimizer was given."""
    built = evidence.incident.cause
    given = {
        ast.unparse(call.func.value)
        for call in evidence.calls(built, "parameters")
        if isinstance(call.func, ast.Attribute)
    }
    found = [
        node
        for node in nodes_in(syntax_tree(built.file))
        if isinstance(node, ast.Assign) and node.lineno > built.line
        if any(ast.unparse(target) in given for target in node.targets)
    ]
    return node_location("writer", built.file, found[0], label) if len(found) == 1 else None


def _assigned(evidence: LoopEvidence, names: list[str], label: str) -> Location | None:
    """The assignment to the part of the model that these parameters belong to, below the optimizer's line."""
    built = evidence.incident.cause
    tree = syntax_tree(built.file)
    wanted = {part for name in names for part in name.split(".")}
    found = [
        node
        for node in nodes_in(tree)
        if isinstance(node, ast.Assign) and node.lineno > built.line
        for target in node.targets
        if (isinstance(target, ast.Attribute) and target.attr in wanted)
        or (isinstance(target, ast.Subscript) and ast.unparse(target.slice) in wanted)
    ]
    return node_location("writer", built.file, found[0], label) if len(found) == 1 else None
