"""DistributedDataParallel waits for the gradient of parameters that the loss does not use.

What: with its default settings, DistributedDataParallel expects every parameter to get a gradient in every backward.
Some did not, so the averaging of the step was never finished, and the next forward fails.

Why: a layer that only some steps use (a branch in `forward`), an output that the loss leaves out, a layer that is built
and never called, parameters that are frozen, or a layer that is replaced, after the model was wrapped.

Cure: pass `find_unused_parameters=True` (it costs a walk over the graph per step), let every output take part in the
loss, freeze the parameters that are not trained, or remove the layer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Treatment
from torchmedic.replay.step.lone_rank import CannotStandIn, two_steps
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.trial import describe, passes
from torchmedic.source.branches import branches_around, exits_before, nodes_around
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.lookup.freezes import where_frozen
from torchmedic.source.lookup.layer_construction import built_at, class_node
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.syntax import callee, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_OF_LIGHTNING = "parameters that were not used in producing the loss"  # what Lightning makes of this message
_SETTINGS = {  # how the argument is called in libraries that wrap the model
    "lightning": '`strategy="ddp_find_unused_parameters_true"` of the Trainer',
    "pytorch_lightning": '`strategy="ddp_find_unused_parameters_true"` of the Trainer',
    "transformers": "`ddp_find_unused_parameters=True` of TrainingArguments",
    "accelerate": "`DistributedDataParallelKwargs(find_unused_parameters=True)` among `kwargs_handlers`",
}
_MAX_NAMED = 6  # parameters
_WITHOUT_GRADIENT = frozenset({"no_grad", "inference_mode"})


@rule("TM706", "parameters-without-gradient")
def check(evidence: RaisedEvidence) -> Draft | None:
    making = evidence.inside("__init__")
    if making is not None and isinstance(making.variables.get("self"), torch.nn.parallel.DistributedDataParallel):
        return _all_frozen(evidence, making.variables.get("module"))
    wrapper = _wrapper(evidence)
    if wrapper is None or not (evidence.says(_UNFINISHED) or evidence.says(_OF_LIGHTNING)):
        return None
    missing = _without_gradient(evidence, wrapper)
    replaced = _replaced(wrapper)
    names = replaced or list(missing)
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    what = ", ".join(f"`{layer}`" for layer in layers[:_MAX_NAMED]) or "some parameters"
    is_frozen = bool(missing) and not any(each.requires_grad for each in missing.values())
    if replaced:
        place_, why = _replacing(evidence, wrapper.module, layers)
    elif is_frozen:
        place_ = where_frozen(evidence.frames, missing.values())
        why = "they were frozen after the model was wrapped, and DistributedDataParallel still counts them"
    else:
        place_, why = _skipped(wrapper.module, layers, evidence)
    draft = check.draft(evidence, "proven" if names else "likely")
    draft.message = f"{what} got no gradient in the last step, and DistributedDataParallel waits for it"
    if replaced:
        draft.message = f"{what} was replaced, and DistributedDataParallel waits for the gradient of the old layer"
    draft.cause = why or "the loss of the last step does not depend on these parameters"
    draft.at(
        place_, *evidence.at_user_line("surfaced" if place_ is not None else "cause", "noticed at the next forward")
    )
    if names and not replaced:
        draft.because(f"no gradient: {', '.join(f'`{name}`' for name in names[:_MAX_NAMED])}")
    draft.because(f"find_unused_parameters={wrapper.find_unused_parameters}, static_graph={wrapper.static_graph}")
    draft.treat(*_treatments(evidence, wrapper, names, is_frozen=is_frozen, is_replaced=bool(replaced)))
    if "no_grad" in why:
        draft.help("freeze these layers before the model is wrapped: `requires_grad_(False)`")
    elif not is_frozen and not replaced:
        draft.help("or let the layers take part in every loss, for example by adding `0.0 * output.sum()`")
    return draft


def _all_frozen(evidence: RaisedEvidence, model: Any) -> Draft | None:
    """A model is wrapped that has nothing to train."""
    if not isinstance(model, torch.nn.Module) or any(each.requires_grad for each in model.parameters()):
        return None
    frozen = dict(model.named_parameters())
    place_ = where_frozen(evidence.frames, frozen.values()) if frozen else None
    draft = check.draft(evidence, "proven", "a model without any trainable parameter was wrapped")
    draft.cause = (
        f"all {len(frozen)} parameters of the model are frozen, so no gradient is left to be averaged"
        if frozen
        else "the model has no parameters, so there is no gradient to be averaged"
    )
    draft.at(place_, *evidence.at_user_line("surfaced" if place_ is not None else "cause", "wrapped here"))
    draft.help("let the layers that are to be trained require a gradient before the model is wrapped")
    return draft.help("or leave out the wrapper: a model that is not trained needs none")


def _without_gradient(evidence: RaisedEvidence, wrapper: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that torch names by number: it counts those that were trained when the model was wrapped.

    Without numbers, they are those that have no gradient, where others have one.
    """
    found = _INDICES.search(evidence.message)
    if found is None:
        known = dict(wrapper.module.named_parameters())
        empty = {name: each for name, each in known.items() if each.grad is None}
        trained = {name: each for name, each in empty.items() if each.requires_grad}
        return (trained or empty) if len(empty) < len(known) else {}
    all_ = list(wrapper.module.named_parameters())
    wanted = [pair for pair in all_ if pair[1].requires_grad]
    count = wrapper.logger._get_ddp_logging_data().ints_map.get("num_parameter_tensors", len(wanted))
    counted = next((each for each in (wanted, all_) if len(each) == count), [])
    return dict(counted[int(word)] for word in found[1].split() if int(word) < len(counted))


def _replaced(wrapper: Any) -> list[str]:
    """The names of parameters that have taken the place of those in the model when it was wrapped."""
    then = {id(each) for each in getattr(wrapper, "_module_parameters", ())}
    now = dict(wrapper.module.named_parameters())
    if then <= {id(each) for each in now.values()}:
        return []
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    return [name for name, each in now.items() if id(each) not in then and name not in ignored]


def _replacing(evidence: RaisedEvidence, root: torch.nn.Module, layers: list[str]) -> tuple[Location | None, str]:
    """The only line of the user's files, outside of the class of the owner, that assigns the layer."""
    found = []
    for layer in layers:
        parent, _, attribute = layer.rpartition(".")
        written = class_node(type(root.get_submodule(parent)))
        inside = range(written[1].lineno, (written[1].end_lineno or 0) + 1) if written is not None else range(0)
        for file in dict.fromkeys(frame.file for frame in evidence.frames if frame.is_user):
            for node in nodes_in(syntax_tree(file)):
                is_own = written is not None and file == written[0] and getattr(node, "lineno", 0) in inside
                targets = node.targets if isinstance(node, ast.Assign) and not is_own else []
                if any(isinstance(each, ast.Attribute) and each.attr == attribute for each in targets):
                    found.append((file, node))
    place_ = (
        node_location("cause", *found[0], "replaced here, after the model was wrapped") if len(found) == 1 else None
    )
    return place_, "it was replaced after the model was wrapped, and DistributedDataParallel knows only the old layer"


def _treatments(
    evidence: RaisedEvidence, wrapper: Any, names: list[str], *, is_frozen: bool, is_replaced: bool
) -> list[Treatment]:
    """What helps, tried on the failing step: it must fail as the job did without the cure, and pass with it.

    A wrapper that is made now does not count frozen or replaced parameters: that the step passes in it is a cure by
    itself. If the failing step uses all parameters, the step before it did not: a step without them stands in for it.
    """
    instead = " in place of `static_graph=True`" if wrapper.static_graph else ""
    packages = [str(frame.live.f_globals.get("__name__", "")).partition(".")[0] for frame in evidence.frames]
    setting = next((_SETTINGS[package] for package in packages if package in _SETTINGS), "")
    title = f"pass `find_unused_parameters=True`{instead} to DistributedDataParallel{f': {setting}' if setting else ''}"
    advice = Treatment(title=title, safety="safe")
    again = Treatment(title="change the layers before the model is wrapped, or wrap it anew")
    is_stale = is_frozen or is_replaced
    beside = [] if is_replaced else [advice]  # the new layer would train apart on each rank
    wanted = [again, *beside] if is_stale else beside
    try:
        runner = evidence.step_through_backward().runner
        plain = two_steps(runner, wrapper)
        if is_stale:
            return [_proven(again, plain), *beside]
        left_out: list[str] = []
        if plain.error is None:
            left_out = names
            plain = two_steps(runner, wrapper, left_out)
        if plain.error is None or _UNFINISHED not in str(plain.error):
            return wanted
        cured = two_steps(runner, wrapper, left_out, find_unused_parameters=True)
        return [_proven(advice, cured, f"a step without `{left_out[0]}` and this one" if left_out else "")]
    except (CannotCut, CannotStandIn):
        return wanted


def _proven(advice: Treatment, played: ReplayResult, steps: str = "") -> Treatment:
    if not passes(played):
        return advice
    result = f"{steps or 'two steps in a row'}, in a group of this rank alone: {describe(played)}"
    return msgspec.structs.replace(advice, proven=True, result=result)


def _wrapper(evidence: RaisedEvidence) -> Any:
    """The DistributedDataParallel whose frame the exception came through."""
    for frame in reversed(evidence.frames):
        module = frame.variables.get("self")
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return module
    return None


def _skipped(root: torch.nn.Module, layers: list[str], evidence: RaisedEvidence) -> tuple[Location | None, str]:
    """The branch around the only use of a layer, else where the layer is built."""
    for layer in layers:
        for file, node in _uses(root, layer):
            around = [(each.line, each.test) for each in branches_around(file, node.lineno)]
            around += [(each.line, each.test) for each in exits_before(file, node.lineno) if each.exit == "return"]
            around = [*_choices(file, node), *around]
            if around:
                line, test = around[0]
                where = place("cause", file, line, f"`{layer}` is used only in one branch of this")
                return where, f"the use of `{layer}` depends on `if {test}`, and the last step went the other way"
            if _is_without_gradient(file, node.lineno):
                why = f"`{layer}` runs under `no_grad`, so no gradient comes to it, and nothing has frozen it"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                chosen = ast.unparse(node.func.slice)
                why = f"`{chosen}` chooses one element of the container, and the last step did not choose `{layer}`"
            else:
                why = f"`{layer}` is called, but the loss does not use its result"
            return node_location("cause", file, node, f"`{layer}` is used here"), why
        built = built_at(evidence.frames, root.get_submodule(layer), "built here, and used nowhere")
        if built is not None:
            return msgspec.structs.replace(built, role="cause"), f"`{layer}` is built and never used"
    return None, ""


def _is_without_gradient(file: str, line: int) -> bool:
    """Whether a `with` around a line switches gradients off."""
    items = [item for node in nodes_around(file, line) if isinstance(node, ast.With) for item in node.items]
    contexts = [each.context_expr for each in items]
    return any(isinstance(each, ast.Call) and callee(each) in _WITHOUT_GRADIENT for each in contexts)


def _choices(file: str, use: ast.expr) -> list[tuple[int, str]]:
    """The lines and tests of the conditional expressions with a use on one of their two sides."""
    return [
        (each.lineno, ast.unparse(each.test))
        for each in nodes_in(syntax_tree(file))
        if isinstance(each, ast.IfExp) and (use in ast.walk(each.body) or use in ast.walk(each.orelse))
    ]


def _uses(root: torch.nn.Module, layer: str) -> Iterator[tuple[str, ast.expr]]:
    """The expressions in the user's classes that read the attribute which holds a layer."""
    parent, _, attribute = layer.rpartition(".")
    owner = root.get_submodule(parent) if parent else root
    if parent and isinstance(owner, torch.nn.ModuleList | torch.nn.ModuleDict):
        parent, _, attribute = parent.rpartition(".")  # a container is read, and an element of it is called
        owner = root.get_submodule(parent) if parent else root
        is_container = True
    else:
        is_container = False
    written = class_node(type(owner))
    if parent and type(owner) is torch.nn.Sequential:  # it is used as a whole
        yield from _uses(root, parent)
    if written is None or not is_user_file(written[0]):
        return
    made = {id(node) for each in written[1].body if getattr(each, "name", "") == "__init__" for node in ast.walk(each)}
    for node in ast.walk(written[1]):
        if not isinstance(node, ast.Attribute) or id(node) in made:
            continue
        if node.attr == attribute and isinstance(node.ctx, ast.Load):
            if not is_container:
                yield written[0], node
            element = layer.rpartition(".")[2]
            for use in _uses_of_elements(written[1], node, element) if is_container else ():
                yield written[0], use


def _uses_of_elements(tree: ast.AST, container: ast.Attribute, element: str) -> Iterator[ast.expr]:
    """The calls of the elements of a container: `self.experts[k](x)`, or those of the variable of a loop over it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and node.func.value is container:
            key = node.func.slice
            if not isinstance(key, ast.Constant) or str(key.value) == element:  # else it is another element
                yield node
        if isinstance(node, ast.For) and container in ast.walk(node.iter):
            names = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
            for each in ast.walk(node):
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in names:
                    yield each
