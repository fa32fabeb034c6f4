"""DistributedDataParallel got the gradient of a parameter twice in one step.

What: DistributedDataParallel sends the gradient of a parameter to the other ranks as soon as backward has computed it.
For one parameter this happened twice between a forward and the end of its averaging.

Why: a layer that is used several times and runs under `checkpoint(..., use_reentrant=True)`, where each use has a
backward of its own; two calls of `backward` for one forward; a layer of `model.module` that is called outside of the
model's `forward`; with `find_unused_parameters=True`, a tensor for the loss that `forward` does not return, or returns
in an object of another class than tuple, list, dict or dataclass: what leads to it counts as unused.

Cure: pass `use_reentrant=False` to `checkpoint`; add the losses and call `backward` once; call all layers inside the
`forward` of the wrapped model; return all tensors for the loss in a tuple, list, dict or dataclass.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel.distributed import _find_tensors

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_node, class_nodes, is_attribute_of, own_names
from torchmedic.source.objects.graph import leaves_behind
from torchmedic.source.syntax import callee, calls_in, has_line, nodes_in, own_nodes
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

_NAME = re.compile(r"with name (\S+) has been marked as ready twice")
_KIND = "use_reentrant"


@rule("TM709", "parameter-ready-twice")
def check(evidence: RaisedEvidence) -> Draft | None:
    if evidence.says("gradient which is undefined, but still allreduced"):
        # A second backward has ended the averaging of a step in which the first one left parameters out.
        message = "a step had two calls of `backward` for one forward, and DistributedDataParallel takes one"
        return _by_second_backward(evidence, message)
    if not evidence.says("expected to mark a variable ready only once"):
        return None
    found = _NAME.search(evidence.message)
    name = found[1] if found is not None else ""
    what = f"the gradient of `{name}`" if name else "the gradient of a parameter"
    message = f"{what} was ready twice in one step, and DistributedDataParallel takes it once"
    draft = (
        _by_checkpoint(evidence, message, name)
        or _outside_forward(evidence, message, name)
        or _by_second_backward(evidence, message)
        or _past_the_result(evidence, message, name)
    )
    if draft is None:
        draft = check.draft(evidence, "possible", message, "why backward reached the parameter twice is not known")
        draft.at(*evidence.at_user_line("cause", "noticed here"))
    return draft


def _by_checkpoint(evidence: RaisedEvidence, message: str, name: str) -> Draft | None:
    """A checkpoint of the reentrant kind runs its own backward, inside of which the exception was raised."""
    frame = next(
        (each for each in reversed(evidence.library_frames) if each.file.endswith("torch/utils/checkpoint.py")), None
    )
    if frame is None or frame.function != "backward":
        return None
    layer = getattr(frame.variables.get("ctx"), "run_function", None)
    unseen = any(each.find_unused_parameters for each in _wrappers(evidence))
    draft = check.draft(evidence, "proven")
    draft.message = message
    draft.cause = "a checkpoint with use_reentrant=True runs a backward of its own for every call" + (
        ", and its layers count as unused by find_unused_parameters" if unseen else ""
    )
    call = _checkpoint_call(evidence, layer) or _setting()
    if call is not None:
        draft.at(node_location("cause", *call, "each call has its own backward"))
    draft.at(*evidence.at_user_line("cause" if call is None else "surfaced", "noticed here"))
    draft.because(f"`{name}` belongs to what the checkpoint runs" if _holds(layer, evidence, name) else "")
    draft.because("find_unused_parameters=True" if unseen else "")
    draft.help("pass `use_reentrant=False` to `checkpoint`")
    return draft


def _setting() -> tuple[str, ast.expr] | None:
    """The only place that asks a library for checkpoints of the reentrant kind."""
    found: list[tuple[str, ast.expr]] = []
    for file, tree in user_trees():
        for node in nodes_in(tree):
            if isinstance(node, ast.keyword) and node.arg == _KIND:
                found.append((file, node.value))
            elif isinstance(node, ast.Dict):
                keys = [isinstance(key, ast.Constant) and key.value == _KIND for key in node.keys]
                found += [(file, value) for is_kind, value in zip(keys, node.values, strict=True) if is_kind]
    found = [each for each in found if not (isinstance(each[1], ast.Constant) and each[1].value is False)]
    return found[0] if len(found) == 1 else None


def _holds(layer: Any, evidence: RaisedEvidence, name: str) -> bool:
    """Whether a checkpointed layer has the parameter of a name."""
    if not isinstance(layer, torch.nn.Module):
        return False
    own = {id(parameter) for parameter in layer.parameters()}
    return any(
        path == name and id(parameter) in own
        for root in _wrapped(evidence)
        for path, parameter in root.named_parameters()
    )


def _checkpoint_call(evidence: RaisedEvidence, layer: Any) -> tuple[str, ast.Call] | None:
    """The call of `checkpoint` for a layer; the only such call where none names the layer."""
    calls = [
        (file, node)
        for file, tree in _sources(evidence)
        for node in calls_in(tree)
        if node.args and _is_reentrant(node)
    ]
    attributes = {
        path.rpartition(".")[2] for root in _wrapped(evidence) for path, each in root.named_modules() if each is layer
    }
    for file, node in calls:
        if isinstance(node.args[0], ast.Attribute) and node.args[0].attr in attributes:
            return file, node
    return calls[0] if len({(file, node.lineno) for file, node in calls}) == 1 else None


def _is_reentrant(node: ast.Call) -> bool:
    if callee(node) not in ("checkpoint", "checkpoint_sequential"):
        return False
    given = [keyword.value for keyword in node.keywords if keyword.arg == _KIND]
    return not (given and isinstance(given[0], ast.Constant) and given[0].value is False)


def _outside_forward(evidence: RaisedEvidence, message: str, name: str) -> Draft | None:
    """The step calls a layer of `model.module` itself, with `find_unused_parameters=True`.

    DistributedDataParallel marks what `forward` has not used as ready, before its gradient comes.
    """
    frame = evidence.user_frame
    if frame is None or not name or not any(each.find_unused_parameters for each in _wrappers(evidence)):
        return None
    path = name.split(".")
    for node in nodes_in(frame.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).split(".")
        if "module" in called[1:-1] and path[: len(below := called[called.index("module", 1) + 1 :])] == below:
            layer = ".".join(below)
            draft = check.draft(evidence, "likely")
            draft.message = message
            draft.cause = f"`{layer}` is called outside of the model's forward, which had counted it as unused"
            draft.at(node_location("cause", frame.file, node, f"`{layer}` is used outside of `forward`"))
            draft.at(*evidence.at_user_line("surfaced", "noticed here"))
            draft.because("find_unused_parameters=True")
            draft.help(f"call `{layer}` inside the `forward` of the wrapped model")
            return draft
    return None


def _by_second_backward(evidence: RaisedEvidence, message: str) -> Draft | None:
    """Another `backward` of the same function, or an earlier turn of this one, keeps its graph for this one."""
    frame = evidence.user_frame
    if frame is None or not isinstance(frame.node, ast.Call) or callee(frame.node) != "backward":
        return None
    functions = [
        node
        for node in nodes_in(frame.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and has_line(node, frame.line)
    ]
    calls = list(calls_in(functions[-1] if functions else frame.tree, "backward"))
    keeping = [node for node in calls if any(keyword.arg == "retain_graph" for keyword in node.keywords)]
    first = next((node for node in keeping if node.lineno <= frame.line), None)
    if first is None:
        return None
    draft = check.draft(
        evidence, "likely", message, "this is the second `backward` for one forward, and both reach the same parameters"
    )
    later = [node for node in calls if node.lineno > frame.line]
    if first.lineno == frame.line and later:  # the first `backward` of the next step fails
        draft.at(node_location("cause", frame.file, later[0], "the second `backward`"))
        draft.at(*evidence.at_user_line("surfaced", "noticed in the next step"))
    else:
        draft.at(*evidence.at_user_line("cause", "the second `backward`"))
        draft.at(node_location("origin", frame.file, first, "the first `backward` keeps its graph"))
    draft.help("add the losses, and call `backward` once")
    return draft


def _past_the_result(evidence: RaisedEvidence, message: str, name: str) -> Draft | None:
    """A tensor came to the loss past the result of `forward`, where `find_unused_parameters=True` looks for tensors."""
    wrapper = next((each for each in _wrappers(evidence) if each.find_unused_parameters), None)
    parameter = dict(wrapper.module.named_parameters()).get(name) if wrapper is not None else None
    result = _replayed_result(evidence, wrapper.module) if wrapper is not None and parameter is not None else None
    if wrapper is None or result is None or any(each is parameter for each in leaves_behind(_find_tensors(result))):
        return None
    draft = check.draft(evidence, "proven", message)
    kind = type(result).__name__
    if not (isinstance(result, torch.Tensor | tuple | list | dict) or is_dataclass(result)):
        draft.cause = (
            f"`forward` returns a `{kind}`, in which DistributedDataParallel finds no tensors: "
            "what leads to it counts as unused"
        )
        places = [*_returned(wrapper.module, kind)]
        draft.help("return the tensors in a tuple, list, dict or dataclass")
    else:
        kept = _kept_in(wrapper.module, parameter)
        draft.cause = (
            f"the loss uses {f'`{kept[0]}`' if kept else 'a tensor'}, which `forward` does not return: "
            "what leads to it counts as unused"
        )
        places = [kept[1]] if kept else []
        draft.help("return every tensor that the loss uses from `forward`")
    draft.at(*places, *evidence.at_user_line("surfaced" if places else "cause", "noticed here"))
    draft.because("find_unused_parameters=True", f"replayed: the result of `forward` does not lead to `{name}`")
    return draft.help("or leave `find_unused_parameters=True` out, if every step uses all parameters")


def _replayed_result(evidence: RaisedEvidence, module: torch.nn.Module) -> Any:
    """What the wrapped module returns in the failing step."""
    results = []
    step = BackwardFailure(evidence).replay()
    if step is not None:
        hook = register_module_forward_hook(
            lambda called, given, result: results.append(result) if called is module else None
        )
        try:
            step.runner.play(backward=False)
        finally:
            hook.remove()
    return results[-1] if results else None


def _returned(module: torch.nn.Module, kind: str) -> Iterator[Location]:
    """Where the `forward` of a module returns its result."""
    written = class_node(type(module))
    for method in written[1].body if written is not None else ():
        if isinstance(method, ast.FunctionDef) and method.name == "forward":
            for node in own_nodes(method):
                if isinstance(node, ast.Return):
                    yield node_location("cause", written[0], node, f"a `{kind}`")  # type: ignore[index]


def _kept_in(root: torch.nn.Module, parameter: Any) -> tuple[str, Location] | None:
    """The attribute of a module that holds a tensor which a parameter leads to, and where it is set."""
    for module in root.modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not any(each is parameter for each in leaves_behind(tensors_in(value, 2))):
                continue
            for file, body in class_nodes(type(module)):
                names = own_names(body)
                for node in nodes_in(body):
                    if is_attribute_of(node, name, names) and isinstance(getattr(node, "ctx", None), ast.Store):
                        return f"self.{name}", node_location("cause", file, node, "not returned by `forward`")
    return None


def _wrappers(evidence: RaisedEvidence) -> list[torch.nn.parallel.DistributedDataParallel]:
    """The DistributedDataParallel modules in the variables of the user's frames, and of the objects among them."""
    found = {}
    for frame in evidence.frames:
        for value in [*frame.variables.values()] if frame.is_user else []:
            held = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
            for each in [value, *held]:
                if issubclass(type(each), torch.nn.parallel.DistributedDataParallel):
                    found[id(each)] = each
    return list(found.values())


def _wrapped(evidence: RaisedEvidence) -> list[torch.nn.Module]:
    return [each.module for each in _wrappers(evidence)]


def _sources(evidence: RaisedEvidence) -> Iterator[tuple[str, ast.AST]]:
    """The user's classes of the wrapped modules."""
    kinds = dict.fromkeys(type(each) for root in _wrapped(evidence) for each in root.modules())
    for kind in kinds:
        written = class_node(kind)
        if written is not None and is_user_file(written[0]):
            yield written
