"""An attribute was read that the module does not have.

What: `self.name` finds what `__init__` assigned to `self`: layers, parameters, buffers, plain values, and methods of
the class. The module has no attribute of this name.

Why: a typing error, a layer kept in a local variable instead of on `self`, an attribute that is assigned in a method
that has not run yet, or a wrapper (`DataParallel`, `DistributedDataParallel`) around the model that has the attribute.

Cure: use the existing name, assign the attribute in `__init__` before it is used, or access the wrapped model with
`.module`.
"""

from __future__ import annotations

import ast
import difflib
import inspect

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import built_here, layer_name
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_node, class_nodes
from torchmedic.source.lookup.origins import attribute_assignments

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")


@rule("TM170", "missing-module-attribute")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _asked(evidence)
    if found is None:
        return _missing_member(evidence)
    module, name = found
    kind = type(module).__name__
    draft = check.draft(evidence, "proven", f"`{kind}` has no attribute `{name}`", _inventory(module))
    draft.at(*evidence.at_user_line("cause", f"`{kind}` has no `{name}`"))
    if _property(module, name, draft) or _wrapper(module, name, draft) or _assigned_elsewhere(module, name, draft):
        return draft
    close = difflib.get_close_matches(name, _names(module), n=3, cutoff=0.6)
    if close:
        draft.because(f"close names that it has: {', '.join(f'`{other}`' for other in close)}")
        draft.help(f"use `{close[0]}`, if that is meant")
    else:
        draft.help(f"assign `self.{name}` in `__init__`, after `super().__init__()`")
    return draft


def _asked(evidence: RaisedEvidence) -> tuple[nn.Module, str] | None:
    """The module and the name, from torch's own `__getattr__`."""
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is None or not isinstance(evidence.error, AttributeError) or frame.function != "__getattr__":
        return None
    module, name = frame.module, frame.variables.get("name")
    if frame.is_user or module is None or not isinstance(name, str) or "_modules" not in module.__dict__:
        return None
    return module, name


def _missing_member(evidence: RaisedEvidence) -> Draft | None:
    """`ModuleDict["b"]` and `ModuleList[3]`."""
    frame = evidence.inside("__getitem__")
    module = frame.module if frame is not None else None
    if frame is None or not isinstance(module, nn.ModuleDict | nn.ModuleList | nn.Sequential | nn.ParameterDict):
        return None
    asked = frame.variables.get("key", frame.variables.get("idx"))
    held = [f"`{name}`" for name in module._modules] or [f"`{name}`" for name in module._parameters]
    if not isinstance(asked, str | int) or not evidence.kinds & {"KeyError", "IndexError"}:
        return None
    name = layer_name(evidence, module)
    members = f"it holds {listed(held, 8)}" if held else "it is empty"
    draft = check.draft(evidence, "proven", f"{name} has no member {asked!r}", members)
    draft.at(*evidence.at_user_line("cause", f"no member {asked!r}"))
    draft.at(built_here(evidence, module, members))
    close = difflib.get_close_matches(str(asked), list(module._modules), n=1) if isinstance(asked, str) else []
    return draft.help(f"use {close[0]!r}, if that is meant" if close else "ask for one that it has, or add this one")


def _names(module: nn.Module) -> list[str]:
    held = [*module._modules, *module._parameters, *module._buffers]
    own = [name for name in module.__dict__ if not name.startswith("_") and name != "training"]
    methods = [name for name in dir(type(module)) if not name.startswith("_")]
    return list(dict.fromkeys([*held, *own, *methods]))


def _inventory(module: nn.Module) -> str:
    held = [f"`{name}`" for name in (*module._modules, *module._parameters, *module._buffers)]
    return f"it holds {listed(held, 8)}" if held else "it holds no layers, parameters or buffers"


def _property(module: nn.Module, name: str, draft: Draft) -> bool:
    """A property that raises AttributeError inside is reported by torch as if it did not exist."""
    found = inspect.getattr_static(type(module), name, None)
    if not isinstance(found, property) or found.fget is None:
        return False
    body = class_node(type(module))
    for node in ast.walk(body[1]) if body is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name and body is not None:
            draft.at(node_location("origin", body[0], node, "this property raised AttributeError itself"))
    draft.because(f"`{name}` is a property of its class: an attribute used inside it is what is missing")
    draft.help("call what the property computes step by step, to see which attribute it lacks")
    return True


def _wrapper(module: nn.Module, name: str, draft: Draft) -> bool:
    for wrapped in _WRAPPED:
        inner = module._modules.get(wrapped)
        if inner is not None and hasattr(inner, name):
            draft.because(f"it wraps a `{type(inner).__name__}`, which has `{name}`")
            draft.help(f"reach through the wrapper: `.{wrapped}.{name}`")
            return True
    return False


def _assigned_elsewhere(module: nn.Module, name: str, draft: Draft) -> bool:
    """The class does assign it, but that line has not run; or it assigns a local variable of that name."""
    for file, statement in attribute_assignments(type(module), name):
        draft.at(node_location("origin", file, statement, f"`{name}` is assigned here, which has not run yet"))
        draft.help("run that assignment before the attribute is used")
        return True
    for file, body in class_nodes(type(module)):
        for method in body.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
                continue
            for inner in ast.walk(method):
                if isinstance(inner, ast.Assign) and any(
                    isinstance(target, ast.Name) and target.id == name for target in inner.targets
                ):
                    draft.at(node_location("origin", file, inner, f"`{name}` is a local variable here"))
                    draft.help(f"assign it to the module: `self.{name} = ...`")
                    return True
    return False
