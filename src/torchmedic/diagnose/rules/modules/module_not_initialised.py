"""A module was used before `nn.Module.__init__` had run.

What: `nn.Module.__init__` makes the tables in which layers, parameters and hooks are stored. Without them no layer can
be assigned and the module cannot be called.

Why: a class defines `__init__` without `super().__init__()`, calls it too late, names it without calling it, or calls
the wrong base class.

Cure: make `super().__init__()` the first line of `__init__`.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.lookup.layer_construction import class_nodes


@rule("TM171", "module-not-initialised")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not isinstance(evidence.error, AttributeError):
        return None
    module = next((frame.module for frame in reversed(evidence.library_frames) if frame.module is not None), None)
    if module is None or "_modules" in module.__dict__:
        return None
    kind = type(module).__name__
    draft = check.draft(evidence, "proven")
    draft.message = f"`{kind}` was used before `nn.Module.__init__` had run for it"
    draft.cause = "the module has no tables for layers and parameters yet"
    draft.at(*evidence.at_user_line("cause", "`super().__init__()` has not run for this module"))
    _where(module, draft)
    return draft.help("call `super().__init__()` as the first line of `__init__`")


def _where(module: nn.Module, draft: Draft) -> None:
    for file, body in class_nodes(type(module)):
        init = next((node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
        if init is None:
            continue
        calls = [node for node in ast.walk(init) if _is_super_init(node)]
        late = next((node for node in calls if isinstance(node, ast.Call)), None)
        if late is not None:
            draft.at(node_location("origin", file, late, "it is called here, which has not run yet"))
        elif calls:
            draft.at(node_location("origin", file, calls[0], "it is named here, but not called"))
        else:
            draft.at(place("origin", file, init.lineno, f"this `__init__` of `{body.name}` does not call it"))
        return


def _is_super_init(node: Any) -> bool:
    """`super().__init__` or `Base.__init__`, called or not."""
    function = node.func if isinstance(node, ast.Call) else node
    return isinstance(function, ast.Attribute) and function.attr == "__init__"
