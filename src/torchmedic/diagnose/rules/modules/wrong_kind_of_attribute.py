"""A value of the wrong type was assigned to a parameter, layer or container of a module.

What: a registered parameter can be replaced only by a parameter, and a registered layer only by a layer: torch rejects
a plain tensor or a number. Containers accept only modules, and a name can be registered only once. An attribute with
the name of a method of `nn.Module` hides this method, or is hidden by it.

Why: a weight replaced by the result of a computation (`.t()`, `* 0.1`), a function (`F.relu`) or a class (`nn.ReLU`,
without `()`) in `nn.Sequential`, a list inside it, `register_buffer` for a name that is already in use, or an
attribute that is called `train`, `to`, `type` or `half`.

Cure: wrap the tensor in `nn.Parameter`, or copy into the existing parameter under `no_grad`; put module instances, not
classes or functions, into containers. Give the attribute another name.
"""

from __future__ import annotations

import ast
import inspect

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.lookup.origins import attribute_assignments


@rule("TM178", "wrong-kind-of-attribute")
def check(evidence: RaisedEvidence) -> Draft | None:
    if (hidden := _name_of_a_method(evidence)) is not None:
        return hidden
    frame = evidence.inside("__setattr__", "add_module", "register_buffer", "register_parameter")
    module = frame.module if frame is not None else None
    if frame is None or module is None or "_modules" not in module.__dict__:
        return None
    known = frame.variables
    name = known.get("name")
    value = known.get("value", known.get("module", known.get("tensor", known.get("param"))))
    if not isinstance(name, str):
        return None
    if "KeyError" in evidence.kinds:
        return _taken(evidence, module, name)
    if "TypeError" not in evidence.kinds:
        return None
    kind = type(module).__name__
    given = _described(value)
    if frame.function == "__setattr__" and name in module._parameters:
        message = f"`{kind}.{name}` is a parameter, and was to be replaced by {given}"
        draft = _draft(evidence, message, "a parameter can be replaced only by a parameter or None", f"{given}")
        draft.help("wrap it: `nn.Parameter(...)`; or write into the old one: `with torch.no_grad(): p.copy_(...)`")
    elif frame.function == "__setattr__" and name in module._modules:
        message = f"`{kind}.{name}` is a layer, and was to be replaced by {given}"
        draft = _draft(evidence, message, "a layer can be replaced only by a module or None", f"{given}")
        draft.help("use another name for the value")
    elif frame.function == "add_module" and not isinstance(value, nn.Module):
        draft = _draft(evidence, f"`{kind}` was given {given} where it takes modules", "it holds modules only", given)
        draft.help(_advice(value))
    else:
        return None
    return draft


def _name_of_a_method(evidence: RaisedEvidence) -> Draft | None:
    """What failed reads an attribute of a module that is called like a method of `nn.Module`."""
    frame = evidence.frames[-1] if evidence.frames else None
    failing = (frame.node or getattr(frame.statement, "iter", None)) if frame is not None else None
    if frame is None or failing is None or not evidence.kinds & {"TypeError", "AttributeError"}:
        return None
    for node in ast.walk(failing):
        owner = read(node.value, frame) if isinstance(node, ast.Attribute) else None
        if not isinstance(node, ast.Attribute) or not isinstance(owner, nn.Module):
            continue
        name, kind = node.attr, type(owner).__name__
        is_layer = name in owner._modules or name in owner._parameters
        if not inspect.isfunction(getattr(nn.Module, name, None)) or not (is_layer or name in vars(owner)):
            continue
        value = None if is_layer else vars(owner)[name]
        if callable(value):
            continue  # a method that was replaced on purpose
        draft = check.draft(evidence, "proven")
        draft.message = f"`{kind}.{name}` has the name of a method of `nn.Module`"
        draft.cause = (
            f"`self.{name}` is the method, and the layer of this name cannot be reached"
            if is_layer
            else f"the attribute, {_described(value)}, stands in place of the method, so nobody can call `{name}()`"
        )
        made = list(attribute_assignments(type(owner), name))
        draft.at(
            *(node_location("cause", file, each, f"`{name}` is a method of `nn.Module`") for file, each in made[:1])
        )
        draft.at(*evidence.at_user_line("surfaced" if made else "cause", f"reads `{name}`"))
        return draft.help("give the attribute another name")
    return None


def _draft(evidence: RaisedEvidence, message: str, cause: str, label: str) -> Draft:
    draft = check.draft(evidence, "proven", message, cause)
    draft.at(*evidence.at_user_line("cause", label))
    return draft


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "a plain tensor"
    if inspect.isclass(value):
        return f"the class `{value.__name__}`, not a module made of it"
    if inspect.isroutine(value):
        return f"the function `{getattr(value, '__name__', '')}`"
    return f"a {type(value).__name__}"


def _advice(value: object) -> str:
    if inspect.isclass(value):
        return f"make a module of it: `{value.__name__}()`"
    if inspect.isroutine(value):
        return "use the module in its place, such as `nn.ReLU()` for `F.relu`"
    if isinstance(value, list | tuple):
        return "pass the modules one by one: `nn.Sequential(*layers)`"
    return "pass modules only"


def _taken(evidence: RaisedEvidence, module: nn.Module, name: str) -> Draft | None:
    if not evidence.says("already exists"):
        return None
    kind = type(module).__name__
    draft = _draft(
        evidence,
        f"`{kind}` already has an attribute `{name}`",
        "a name can be registered once, and not where the class or `self` has it already",
        f"`{name}` is taken",
    )
    for file, statement in attribute_assignments(type(module), name):
        draft.at(node_location("origin", file, statement, f"`{name}` is assigned here"))
    return draft.help("register it under another name, or leave out the other assignment")
