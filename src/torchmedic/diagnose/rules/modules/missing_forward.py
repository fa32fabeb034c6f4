"""A module without a `forward` method was called.

What: calling a module runs its `forward`. Neither this class nor any of its base classes has one.

Why: the name is misspelled, the method is indented into `__init__` and is therefore a local function, or the module is
a plain container (`ModuleList`, `ModuleDict`) that stores layers but does not run them.

Cure: name the method `forward` and indent it like `__init__`; loop over a `ModuleList`, or use `nn.Sequential`.
"""

from __future__ import annotations

import ast
import difflib

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import layer_name
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import place
from torchmedic.source.lookup.layer_construction import class_nodes


@rule("TM172", "missing-forward")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside("_forward_unimplemented")
    module = frame.module if frame is not None else None
    if module is None or "NotImplementedError" not in evidence.kinds:
        return None
    kind = type(module).__name__
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    draft = check.draft(evidence, "proven")
    draft.message = f"{layer_name(evidence, module)} was called, and has no `forward`"
    draft.cause = (
        f"a `{kind}` holds modules and runs none of them" if container else f"no class above `{kind}` defines `forward`"
    )
    draft.at(*evidence.at_user_line("cause", f"this calls `{kind}.forward`, which does not exist"))
    if container:
        return draft.help("loop over its members, or use `nn.Sequential` if each is fed by the one before it")
    _look_alike(module, draft)
    return draft


def _look_alike(module: nn.Module, draft: Draft) -> None:
    """A method that was meant to be `forward`."""
    for file, body in class_nodes(type(module)):
        own = {node.name: node for node in body.body if isinstance(node, ast.FunctionDef)}
        for method in own.values():
            for inner in ast.walk(method):
                if inner is not method and isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                    draft.at(
                        place("origin", file, inner.lineno, f"this `forward` is a function inside `{method.name}`")
                    )
                    draft.help("indent `forward` like the other methods of the class")
                    return
        close = difflib.get_close_matches(
            "forward", [name for name in own if not name.startswith("__")], n=1, cutoff=0.7
        )
        name = close[0] if close else "__call__" if "__call__" in own else ""
        if name:
            draft.at(place("origin", file, own[name].lineno, f"`{name}` is not the name that torch calls"))
            draft.help(f"rename `{name}` to `forward`")
            return
        draft.at(place("origin", file, body.lineno, "this class defines no `forward`"))
        break
    draft.help("define `forward(self, ...)` in the class")
