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
from torchmedic.source.lookup.layer_construction import class_node


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
    for kind in type(module).__mro__:
        found = class_node(kind)
        init = next((node for node in found[1].body if _is_init(node)), None) if found is not None else None
        if found is None or init is None:
            continue
        calls = [node for node in ast.walk(init) if _is_super_init(node)]
        late = next((node for node in calls if isinstance(node, ast.Call)), None)
        if late is not None:
            draft.at(node_location("origin", found[0], late, "it is called here, which has not run yet"))
        elif calls:
            draft.at(node_location("origin", found[0], calls[0], "it is named here, but not called"))
        else:
            draft.at(place("origin", found[0], init.lineno, f"this `__init__` of `{kind.__name__}` does not call it"))
        return


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _is_super_init(node: Any) -> bool:
    """`super().__init__` or `Base.__init__`, called or not."""
    function = node.func if isinstance(node, ast.Call) else node
    return isinstance(function, ast.Attribute) and function.attr == "__init__"
