"""A custom Function has no `backward`, or its `backward` cannot be called or returns an unusable result.

What: a Function that is differentiated needs a static method `backward(ctx, *gradients)`. The method receives one
gradient per output of `forward`, and returns tensors or `None`. `ctx.save_for_backward` accepts only tensors.

Why: `backward` is missing or misspelt, is not a `@staticmethod`, takes a number of arguments that differs from the
number of outputs of `forward`, or returns numbers; or a number was passed to `save_for_backward`.

Cure: write `backward` as a static method with `ctx` and one argument per output; store values that are not tensors as
attributes of `ctx`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.custom_functions import (
    functions_behind,
    gradients,
    head_location,
    method_node,
    return_node,
    returned_location,
    returns_in_replay,
)
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import class_node
from torchmedic.source.syntax import last_name, nodes_in
from torchmedic.source.user_variables import user_trees


@rule("TM112", "missing-or-bad-backward")
def check(evidence: RaisedEvidence) -> Draft | None:
    kind = _function(evidence)
    draft = None
    for find in (_missing, _once, _saved, _uncallable, _not_a_tensor):
        draft = draft or find(evidence, kind)
    return draft


def _function(evidence: RaisedEvidence) -> type | None:
    """The class whose method torch was about to call or had just called, from torch's own frame."""
    for frame in reversed(evidence.frames):
        if frame.is_user:
            return None
        if frame.function in ("apply", "apply_boxed"):
            owner = frame.variables.get("self")
            kind = getattr(owner, "_forward_cls", None) or frame.variables.get("cls")
            return kind if isinstance(kind, type) else None
    return None


def _missing(evidence: RaisedEvidence, kind: type | None) -> Draft | None:
    if "NotImplementedError" not in evidence.kinds or not evidence.says("implement", "backward", "vjp"):
        return None
    name = kind.__name__ if kind is not None else "the Function"
    draft = check.draft(
        evidence, "proven" if kind else "likely", f"`{name}` has no backward", "torch must differentiate it"
    )
    place = class_node(kind) if kind is not None else None
    if place is None:
        return draft.at(*_noticed(evidence, "cause")).help("write a static method `backward(ctx, ...)`")
    file, body = place
    methods = [node for node in body.body if isinstance(node, ast.FunctionDef)]
    close = difflib.get_close_matches("backward", [node.name for node in methods], 1, 0.7)
    if close:
        node = next(node for node in methods if node.name == close[0])
        draft.at(head_location("cause", file, node, f"`{close[0]}`, not `backward`"))
        draft.help(f"rename `{close[0]}` to `backward`")
    else:
        draft.at(head_location("cause", file, body, "this class defines no `backward`"))
        draft.help("write a static method `backward(ctx, ...)` with one argument per output of `forward`")
    return draft.at(*_noticed(evidence))


def _uncallable(evidence: RaisedEvidence, kind: type | None) -> Draft | None:
    if "TypeError" not in evidence.kinds or kind is None or not evidence.says("argument"):
        return None
    inner = evidence.frames[-1]
    found = method_node(kind, "backward", "vjp")
    function: Callable[..., Any] | None = getattr(kind, "backward", None)
    if found is None or function is None or not hasattr(inner.variables.get("self"), "_forward_cls"):
        return None
    file, node = found
    given = 1 + len(inner.variables.get("args", ()))
    try:
        inspect.signature(function).bind(*range(given))
        return None
    except (TypeError, ValueError):
        pass
    names = [argument.arg for argument in node.args.args]
    draft = check.draft(evidence, "proven")
    draft.message = f"`{kind.__name__}.backward` cannot be called with `ctx` and {count(given - 1, 'gradient')}"
    draft.cause = f"its forward has {count(given - 1, 'output')}, and its backward takes {', '.join(names)}"
    draft.at(head_location("cause", file, node, f"takes {len(names)} arguments, is given {given}"))
    static = any(ast.unparse(part).endswith("staticmethod") for part in node.decorator_list)
    if not static and names[:1] == ["self"]:
        draft.help("make it a `@staticmethod` that takes `ctx` first, not `self`")
    else:
        draft.help("take `ctx` and one gradient per output of `forward`")
    return draft.at(*_noticed(evidence))


def _not_a_tensor(evidence: RaisedEvidence, kind: type | None) -> Draft | None:
    if not evidence.says("expected Variable or None"):
        return None
    failure = BackwardFailure(evidence)
    seen = returns_in_replay(failure, functions_behind(failure))
    last = seen[-1] if seen else None
    bad = [value for value in gradients(last.value) if not _is_gradient(value)] if last is not None else []
    what = type(bad[0]).__name__ if bad else "something that is not a tensor"
    name = last.kind.__name__ if last is not None else "a custom Function"
    draft = check.draft(evidence, "proven" if bad else "likely")
    draft.message = f"the backward of `{name}` returned {what}"
    draft.cause = "a gradient is a tensor, or `None` where there is none"
    place = return_node(last.kind, last.line) if last is not None else None
    if place is not None:
        draft.at(returned_location(place, f"returns {what}"))
        draft.at(*_noticed(evidence))
    else:
        draft.at(*_noticed(evidence, "cause"))
    return draft.help("return a tensor of the shape of the input")


def _is_gradient(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _once(evidence: RaisedEvidence, _kind: type | None) -> Draft | None:
    """Backward of a gradient, where a Function says that its backward has none."""
    if not evidence.says("differentiate twice", "once_differentiable"):
        return None
    marks = [
        (file, kind, mark)
        for file, tree in user_trees()
        for kind in nodes_in(tree)
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
        for mark in method.decorator_list
        if last_name(mark) == "once_differentiable"
    ]
    behind = {found.__name__ for found in functions_behind(BackwardFailure(evidence))}
    seen = [each for each in marks if each[1].name in behind]
    chosen = seen or marks
    name = f"`{chosen[0][1].name}`" if len(chosen) == 1 else "a Function"
    draft = check.draft(evidence, "proven" if len(seen) == 1 else "likely")
    draft.message = f"the gradient of a gradient goes through {name}, whose backward has no derivative"
    draft.cause = "`@once_differentiable` runs backward without recording it"
    for file, _, mark in chosen:
        draft.at(node_location("cause", file, mark, "no second derivative from here"))
    draft.at(*_noticed(evidence, "surfaced" if chosen else "cause"))
    return draft.help(
        "leave out `@once_differentiable` if `backward` is made of torch operations on saved tensors; "
        "else do not take gradients of gradients through it"
    )


def _saved(evidence: RaisedEvidence, kind: type | None) -> Draft | None:
    says_saved = evidence.says("save_for_backward can only save variables")
    says_dirty = evidence.says("marked as dirty", "not returned as output")
    if kind is None or not (says_saved or says_dirty):
        return None
    call = "save_for_backward" if says_saved else "mark_dirty"
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`{kind.__name__}` passes to `{call}` what is {'no tensor' if says_saved else 'not among its outputs'}"
    )
    draft.cause = evidence.message.splitlines()[0][:200]
    place = None
    for method in ("forward", "setup_context"):
        found = method_node(kind, method)
        for node in ast.walk(found[1]) if found is not None else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == call:
                assert found is not None
                place = place or node_location("cause", found[0], node, "this call")
    draft.at(place, *_noticed(evidence, "surfaced" if place is not None else "cause"))
    return draft.help(
        "keep numbers as attributes: `ctx.k = k`" if says_saved else "return every tensor that is marked dirty"
    )


def _noticed(evidence: RaisedEvidence, role: Any = "surfaced") -> tuple[Location, ...]:
    return evidence.at_user_line(role, "noticed here")
