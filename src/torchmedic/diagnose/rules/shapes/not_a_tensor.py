"""A value that is not a tensor was used where a tensor is needed.

What: an operation of torch, or a method of a tensor, was called with a tuple, a dict, None, a number or a NumPy array.

Why: recurrent layers and attention return a tuple (`output, hidden`), some models return a dict, a `forward` without
`return` returns None, `.item()` returns a number, and NumPy arrays are not converted automatically. `x.grad` is None
for a tensor that is the result of an operation. A library that calls backward itself was given no loss: the
`training_step` or `compute_loss` of the user returned None, a number or a dict without it.

Cure: select the right part (`out, _ = lstm(x)`, `out["logits"]`), return the result, or convert with `torch.as_tensor`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes import _handed
from torchmedic.diagnose.words.tensors import fed_by, layer_of, origin
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.failing_call import UNKNOWN, Argument, Call, read
from torchmedic.source.lookup.origins import Origin, origin_of
from torchmedic.source.syntax import calls_in, function_of, makes_number, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_MAX_PARTS = 2  # of a batch that is a list: inputs and targets
_MUST_BE = re.compile(r"argument '?(\w+)'?.* must be (?:a )?Tensor, not ([\w.]+)|expected Tensor as element (\d+)")
_OPERANDS = re.compile(r"unsupported operand type\(s\) for (\S+): '(\w+)' and '(\w+)'")


@rule("TM165", "not-a-tensor")
def check(evidence: RaisedEvidence) -> Draft | None:
    handed = _handed.describe(check.draft(evidence, "proven"), evidence)
    if handed is not None or not evidence.is_torchs:
        return handed
    return _argument(evidence) or _attribute(evidence) or _subscript(evidence) or _operand(evidence)


def _kind(value: Any) -> str:
    if type(value).__module__ == "torch.return_types":
        return f"a tuple ({', '.join(name for name in dir(value) if name in ('values', 'indices'))})"
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeio" else f"a {name}"


def _argument(evidence: RaisedEvidence) -> Draft | None:
    """`linear(): argument 'input' must be Tensor, not tuple`."""
    named = _MUST_BE.search(evidence.message) if "TypeError" in evidence.kinds else None
    call = evidence.call
    if call is not None and evidence.says("invalid combination of arguments") and "TypeError" in evidence.kinds:
        return _first_argument(evidence, call)
    if named is None or call is None:
        return None
    wanted = named[2].rpartition(".")[2] if named[2] else ""
    members = list(call.flat()) if named[3] else call.arguments
    odd = next(
        (
            item
            for item in members
            if item.tensor is None
            and item.value is not UNKNOWN
            and (type(item.value).__name__ == wanted if wanted else not isinstance(item.value, int | bool))
        ),
        None,
    )
    if odd is None:
        draft = check.draft(
            evidence, "likely", f"`{call.op}` was given {wanted or 'something else'} where it takes a tensor", named[0]
        )
        return _advised(evidence, draft, UNKNOWN, None, f"{wanted or 'this'} is not a tensor")
    made = origin(evidence, odd.value)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{call.op}` was given {_kind(odd.value)} where it takes a tensor"
    draft.cause = f"`{odd.text or named[1]}` is {_described(odd.value)}"
    draft.because(fed_by(evidence, layer_of(evidence, call)))
    return _advised(evidence, draft, odd.value, made)


def _first_argument(evidence: RaisedEvidence, call: Call) -> Draft | None:
    """`conv1d() received an invalid combination of arguments - got (tuple, Parameter, ...)`."""
    first = call.arguments[0] if call.arguments else None
    if first is None or not isinstance(first.value, tuple | list | dict | type(None)) or not _wants_tensor(evidence):
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"`{call.op}` was given {_kind(first.value)} where it takes a tensor"
    draft.cause = f"`{first.text}` is {_described(first.value)}"
    draft.because(fed_by(evidence, layer_of(evidence, call)))
    return _advised(evidence, draft, first.value, origin(evidence, first.value))


def _wants_tensor(evidence: RaisedEvidence) -> bool:
    """torch lists what it would have taken: a tensor in front, in every form."""
    forms = re.findall(r"^\s*\* \((.*)\)$", evidence.message, re.M)
    return bool(forms) and all(form.startswith("Tensor") for form in forms)


def _attribute(evidence: RaisedEvidence) -> Draft | None:
    """`'tuple' object has no attribute 'size'`, where tensors have it."""
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is None or not isinstance(evidence.error, AttributeError) or not isinstance(frame.node, ast.Attribute):
        return None
    name, value = frame.node.attr, read(frame.node.value, frame)
    if value is None and (missing := _missing_gradient(evidence, frame, frame.node.value)) is not None:
        return missing
    if not isinstance(value, tuple | list | dict | str | float | int | None) or not hasattr(torch.Tensor, name):
        return None
    made = origin_of(evidence.frames, frame, frame.node.value)
    # A plain Python slip is not ours to explain: the value must come out of torch, or was given to torch.
    is_torchs = made is not None and (_from_module(evidence, made) or _from_tensor(made) or name == "backward")
    holds_tensors = isinstance(value, list | tuple) and value and all(isinstance(each, torch.Tensor) for each in value)
    if frame.is_user and not is_torchs and not holds_tensors:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"{_kind(value)} was used as a tensor: it has no `{name}`"
    draft.cause = f"`{ast.unparse(frame.node.value)}` is {_described(value)}"
    return _advised(evidence, draft, value, made)


def _missing_gradient(evidence: RaisedEvidence, frame: Frame, node: ast.expr) -> Draft | None:
    """`x.grad.sign()` where `x.grad` is None."""
    owner = read(node.value, frame) if isinstance(node, ast.Attribute) and node.attr == "grad" else None
    if not isinstance(node, ast.Attribute) or not isinstance(owner, torch.Tensor) or not frame.is_user:
        return None
    name = ast.unparse(node.value)
    draft = check.draft(evidence, "proven", f"`{name}.grad` is None: backward gave `{name}` no gradient")
    if owner.is_leaf:
        draft.cause = "no backward has come to it yet" if owner.requires_grad else "it does not require gradients"
        draft.at(*evidence.at_user_line("cause", "None, not a tensor"))
        return draft.help(f"call `{name}.requires_grad_()` before the forward pass" if not owner.requires_grad else "")
    draft.cause = f"`{name}` is the result of an operation, and backward keeps gradients of leaves only"
    made = origin_of(evidence.frames, frame, node.value)
    draft.mark(made, "cause", f"`{name}` is no leaf from here on")
    draft.at(*evidence.at_user_line("surfaced" if made is not None else "cause", "None, not a tensor"))
    return draft.help(f"make it a leaf: `.detach().requires_grad_()`, or call `{name}.retain_grad()` before backward")


def _subscript(evidence: RaisedEvidence) -> Draft | None:
    """`out[:, -1]` of the tuple that a recurrent layer returns."""
    call = evidence.call
    if "TypeError" not in evidence.kinds or call is None or call.op != "index" or not evidence.says("indices must be"):
        return None
    value = call.arguments[0].value
    if not isinstance(value, tuple | list) or not isinstance(call.arguments[1].value, tuple):
        return None
    made = origin_of(evidence.frames, call.frame, call.arguments[0].node)
    if made is None or not _from_module(evidence, made):
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"{_kind(value)} was indexed like a tensor"
    draft.cause = f"`{call.arguments[0].text}` is {_described(value)}"
    return _advised(evidence, draft, value, made)


def _operand(evidence: RaisedEvidence) -> Draft | None:
    """`x + attention(x, x, x)`."""
    call = evidence.call
    found = _OPERANDS.search(evidence.message) if "TypeError" in evidence.kinds else None
    if found is None or call is None or "Tensor" not in found.groups() or len(call.arguments) != 2:
        return None
    if found[2] == found[3]:
        return None
    odd: Argument = call.arguments[1 if found[2] in ("Tensor", "Parameter") else 0]
    kind = found[3] if odd is call.arguments[1] else found[2]
    draft = check.draft(evidence, "proven" if odd.value is not UNKNOWN else "likely")
    draft.message = f"`{found[1]}` of a tensor and a {kind}"
    draft.cause = f"`{odd.text}` is {_described(odd.value) if odd.value is not UNKNOWN else 'a ' + kind}"
    made = origin_of(evidence.frames, call.frame, odd.node) if isinstance(odd.node, ast.Name) else None
    return _advised(evidence, draft, () if kind == "tuple" else odd.value, made, f"`{odd.text}` is a {kind}")


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(item).__name__ for item in value[:4])}"
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, list(value)[:5]))}"
    return _kind(value)


def _from_module(evidence: RaisedEvidence, made: Origin) -> bool:
    return _module_behind(evidence, made) is not None


def _module_behind(evidence: RaisedEvidence, made: Origin) -> nn.Module | None:
    """The module whose result a value is."""
    for frame in reversed(evidence.frames):
        if frame.file == made.file and isinstance(made.value, ast.Call):
            module = read(made.value.func, frame)
            if isinstance(module, nn.Module):
                return module
    return None


def _from_tensor(made: Origin) -> bool:
    """`pred = x.max(1)` and `loss = loss.item()`: methods of tensors that do not return one."""
    value = made.value
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and hasattr(torch.Tensor, value.func.attr)
    )


def _advised(evidence: RaisedEvidence, draft: Draft, value: Any, made: Origin | None, label: str = "") -> Draft:
    label = label or f"{_kind(value)}, not a tensor"
    if made is not None and isinstance(value, str) and _is_key(evidence, made, value):
        draft.at(made.location("cause", "to unpack a dict gives its keys"))
        draft.at(*evidence.at_user_line("surfaced", label))
        return draft.help(f"take the entry that is meant, as in `{ast.unparse(made.value or ast.Name(''))}[{value!r}]`")
    returned = _returned(evidence, made, value) if made is not None else None
    draft.at(returned, *evidence.at_user_line("surfaced" if returned is not None else "cause", label))
    module = _module_behind(evidence, made) if made is not None else None
    if made is not None:
        whose = f", from `{type(module).__name__}`" if module is not None else ""
        label = f"`{made.name}` holds it" if made.holds else f"`{made.name}` becomes {_kind(value)} here{whose}"
        draft.at(made.location("origin", label))
    if value is None and module is not None:
        draft.because(f"`{type(module).__name__}.forward` returned None, as a function without `return` does")
        draft.help("let `forward` return its result")
    elif value is None and returned is not None:
        draft.help("let the function return its result")
    elif isinstance(value, tuple):
        draft.help("take the part that is meant, as in `out, _ = layer(x)`")
    elif (
        isinstance(value, list)
        and len(value) > _MAX_PARTS
        and len({getattr(item, "shape", None) for item in value}) == 1
    ):
        draft.help("make one tensor of them: `torch.stack(...)`, in the collate function if they are a batch")
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        draft.help("take the tensor that is meant out of the list, as in `x, y = batch` or `batch[0]`")
    elif isinstance(value, dict):
        draft.help("take the entry that is meant, as in `out['logits']`")
    elif isinstance(value, float | int):
        draft.help("keep the tensor: `.item()` and sums that start as a number leave the graph")
    else:
        draft.help("convert it with `torch.as_tensor(...)`, or pass the tensor that was meant")
    return draft


def _returned(evidence: RaisedEvidence, made: Origin, value: Any) -> Location | None:
    """The line of the user's function behind a call that made the number which it returned, or that returned None."""
    frame = next((frame for frame in reversed(evidence.frames) if frame.file == made.file), None)
    if frame is None or not isinstance(made.value, ast.Call):
        return None
    called = read(made.value.func, frame)
    called = type(called).forward if isinstance(called, nn.Module) and value is not None else called
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    function = function_of(syntax_tree(code.co_filename), code) if code and is_user_file(code.co_filename) else None
    if function is None or code is None:
        return None
    results = [node.value for node in nodes_in(function) if isinstance(node, ast.Return) and node.value is not None]
    if value is None and not results:
        return node_location("cause", code.co_filename, function, "returns nothing")
    names = {result.id for result in results if isinstance(result, ast.Name)}
    results += [
        node.value
        for node in nodes_in(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names
    ]
    numbers = [call for result in results for call in calls_in(result) if makes_number(call)]
    is_number = isinstance(value, float | int) and len(numbers) == 1
    return node_location("cause", code.co_filename, numbers[0], "makes a number of the tensor") if is_number else None


def _is_key(evidence: RaisedEvidence, made: Origin, value: str) -> bool:
    """Whether the statement that made a value unpacks a dict of which the value is a key."""
    frame = next((frame for frame in reversed(evidence.frames) if frame.file == made.file), None)
    holder = read(made.value, frame) if frame is not None and made.value is not None else None
    return isinstance(holder, Mapping) and value in holder
