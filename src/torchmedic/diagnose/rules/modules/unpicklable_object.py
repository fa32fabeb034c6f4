"""An object that is saved or sent to another process holds something that cannot be pickled.

What: `torch.save` of a whole object, the start of a process by `spawn` or `forkserver`, and collectives for objects
(`all_gather_object`) write a pickle. A pickle holds a function or a class only by its name in a module. A lambda, a
function inside of a function, a lock, an open file, a socket or a generator cannot be written.

Why: a transform, a `collate_fn` or an activation is a lambda, a dataset keeps an open file or a lock, or a whole model
is saved where its weights would do.

Cure: give the function a name at the top of a module (`def`), open files and make locks in the worker, and save
`model.state_dict()` instead of the model.
"""

from __future__ import annotations

import ast
from collections import deque
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.failing_call import UNKNOWN
from torchmedic.source.lookup.layer_construction import class_nodes
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.objects.containers import items
from torchmedic.source.objects.parts import attributes
from torchmedic.source.syntax import CALLABLES, nodes_in, syntax_tree

_MAX_OBJECTS = 20_000
_WRITERS = frozenset({"dump", "dumps", "_save", "_legacy_save", "_object_to_tensor"})
_CONTAINERS = (list, tuple, dict, set, deque)
_PLAIN = (str, bytes, int, float, bool, type(None), type)


class Found(NamedTuple):
    """The part that cannot be pickled, and the attribute that it is found under."""

    value: Any
    owner: Any
    attribute: str


@rule("TM181", "unpicklable-object")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"PicklingError", "AttributeError", "TypeError"}:
        return None
    if not (evidence.says("pickle") or evidence.says("local object")):  # the latter is all that Python 3.13 says
        return None
    written = _written(evidence)
    found = _search(written, evidence.message) if written is not UNKNOWN else None
    if found is None:
        return None
    to_ranks = evidence.inside("_object_to_tensor") is not None
    sent = to_ranks or any("multiprocessing" in frame.file for frame in evidence.library_frames)
    what = _words(found.value)
    of = f"`{found.attribute}` of `{type(found.owner).__name__}` is " if found.attribute else ""
    draft = check.draft(evidence, "proven")
    draft.message = f"{of}{what}, which cannot be pickled"
    draft.cause = (
        "objects are sent to other ranks as a pickle, with all that they hold"
        if to_ranks
        else "a process that is not forked gets its arguments as a pickle"
        if sent
        else f"a pickle of a whole `{type(written).__name__}` is written, with all that it holds"
    )
    made = _made_at("cause" if sent else "origin", found, f"{what} is made here")
    draft.at(made)
    surfaced: Role = "surfaced" if sent and made is not None else "cause"
    draft.at(
        *evidence.at_user_line(
            surfaced, "sent here" if to_ranks else "the processes are started here" if sent else "pickled here"
        )
    )
    if isinstance(written, nn.Module):
        draft.help("save `model.state_dict()`, and load it into a model that the code has built")
    if to_ranks:
        return draft.help("send its result, or the values that it is made of")
    if isinstance(found.value, FunctionType):
        return draft.help("define the function with `def` at the top of a module")
    return draft.help("make it in the process that uses it: in `worker_init_fn`, or when it is first used")


def _written(evidence: RaisedEvidence) -> Any:
    """The object that was to be pickled: an argument of the innermost frame that writes, or of the user's own call."""
    for frame in reversed(evidence.library_frames):
        if frame.function in _WRITERS and "obj" in frame.variables:
            return frame.variables["obj"]
    call = evidence.find("dump", "dumps")
    return call.get(0, "obj") if call is not None else UNKNOWN


def _search(root: Any, message: str) -> Found | None:
    """The nearest part of an object that is what the message names: a function, or an object of a class."""
    pending: deque[Found] = deque([Found(root, None, "")])
    seen: set[int] = set()
    while pending and len(seen) < _MAX_OBJECTS:
        part = pending.popleft()
        kind = type(part.value)
        if id(part.value) in seen or issubclass(kind, _PLAIN):
            continue
        seen.add(id(part.value))
        if isinstance(part.value, FunctionType):
            if part.value.__qualname__ in message:
                return part
            continue
        if f"'{kind.__module__}.{kind.__qualname__}'" in message or f"'{kind.__qualname__}'" in message:
            return part
        if isinstance(part.value, _CONTAINERS):
            pending.extend(part._replace(value=item) for _, item in items(part.value))
        elif isinstance(part.value, MethodType):
            pending.append(part._replace(value=part.value.__self__))
        elif isinstance(part.value, partial):
            inner = (part.value.func, part.value.args, part.value.keywords)
            pending.extend(part._replace(value=item) for item in inner)
        else:
            pending.extend(Found(item, part.value, name) for name, item in attributes(part.value, kind))
    return None


def _words(value: Any) -> str:
    if not isinstance(value, FunctionType):
        return f"a `{type(value).__qualname__}`"
    return "a lambda" if value.__name__ == "<lambda>" else f"the local function `{value.__name__}`"


def _made_at(role: Role, found: Found, label: str) -> Location | None:
    """The function in the source; else the line that sets the attribute: the only one, or the one of `__init__`."""
    if isinstance(found.value, FunctionType):
        code = found.value.__code__
        nodes = [
            node
            for node in nodes_in(syntax_tree(code.co_filename))
            if isinstance(node, CALLABLES) and node.lineno == code.co_firstlineno
        ]
        lambdas = [node for node in nodes if isinstance(node, ast.Lambda) == (code.co_name == "<lambda>")]
        return node_location(role, code.co_filename, lambdas[0], label) if lambdas else None
    if found.owner is None:
        return None
    lines = [each for each in attribute_assignments(type(found.owner), found.attribute) if not _gives_nothing(each[1])]
    if len(lines) > 1:
        inits = [part for _, body in class_nodes(type(found.owner)) for part in body.body if _is_init(part)]
        begins = {id(node) for init in inits for node in ast.walk(init)}
        lines = [each for each in lines if id(each[1]) in begins]
    return node_location(role, *lines[0], label) if len(lines) == 1 else None


def _gives_nothing(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"
