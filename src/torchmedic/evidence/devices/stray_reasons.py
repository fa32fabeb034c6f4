"""Why a tensor is not where the others are: the first explanation that the user's own code and the replay bear out."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from torchmedic.evidence.devices.device_births import Words, device_words
from torchmedic.evidence.devices.stray_modules import (
    attribute,
    late_module,
    model_left_behind,
    of_the_class,
    other_module,
    unregistered_layer,
)
from torchmedic.evidence.devices.strays import Reason, Stray
from torchmedic.replay.step.trial import node_at
from torchmedic.source.bindings import function_body, own_statements
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.syntax import callee, calls_in, function_of, nodes_in, own_nodes, syntax_tree
from torchmedic.source.user_code import is_user_file

FACTORIES = frozenset(
    "tensor as_tensor zeros ones empty full eye arange linspace logspace rand randn randint randperm normal "
    "scalar_tensor tril_indices triu_indices hann_window hamming_window".split()
)
MAKERS = FACTORIES | {"from_numpy", "Tensor", "FloatTensor", "LongTensor", "frombuffer", "load"}
_MOVES = frozenset({"to", "cuda", "cpu"})
_MAX_EXPLANATIONS = 4


def reasons_of(strays: list[Stray]) -> list[tuple[Stray, Reason]]:
    """All explanations that hold, the most telling first: which of them matters, a trial has to show."""
    found = [(stray, reason) for stray in strays for explain in _EXPLANATIONS if (reason := explain(stray)) is not None]
    return found[:_MAX_EXPLANATIONS]


def _made_in_step(stray: Stray) -> Reason | None:
    """A factory that was not told a device makes its tensor on the default one."""
    born = [birth for birth in stray.births if birth.made is not None and birth.made.spot is not None]
    made = [birth.made for birth in born if not birth.moved and birth.made is not None]
    if not made or made[0].spot is None:
        return None
    first = made[0].spot
    calls = [
        found[0]
        for each in made
        if each.spot is not None and each.spot.file == first.file and (found := node_at(each.spot)) is not None
    ]
    if not calls:
        return None
    name = callee(calls[0]) if isinstance(calls[0], ast.Call) else made[0].op
    return _made_on(stray, name, first.file, calls, made[0].words)


def _made_on(stray: Stray, name: str, file: str, calls: list[Any], words: Words) -> Reason | None:
    call = calls[0]
    given = next((word.value for word in call.keywords if word.arg == "device"), None) if _is_call(call) else None
    if given is not None:
        text = ast.unparse(given)
        fact, advice = f"`{name}` was told to make its tensor on {stray.device}", f"pass another device than `{text}`"
    elif name in FACTORIES:
        fact = f"`{name}` without `device=` makes its tensor on {stray.device}"
        advice = f"pass `device=` to `{name}`, for example that of the tensor it is used with"
    else:
        fact = f"`{name}` makes its tensor on {stray.device}"
        advice = f"move what `{name}` makes: `.to(...)`"
    return Reason(
        kind="made",
        fact=fact,
        advice=advice,
        place=node_location("cause", file, call, f"made on {stray.device}"),
        file=file,
        nodes=tuple(calls),
        words=words,
    )


def _is_call(node: Any) -> bool:
    return isinstance(node, ast.Call)


def _taken_off(stray: Stray) -> Reason | None:
    """`.cpu()` or `.to(...)` in the step itself brought it there."""
    for birth in stray.births:
        spot = birth.made.spot if birth.made is not None and birth.moved else None
        found = node_at(spot) if spot is not None else None
        if spot is None or found is None:
            continue
        text = ast.unparse(found[0])
        return Reason(
            kind="taken off",
            fact=f"`{text}` brings it to {stray.device}",
            advice=f"leave it on {stray.split.home}: do without `{text}` there",
            place=node_location("cause", spot.file, found[0], f"brought to {stray.device} here"),
            file=spot.file,
            nodes=(found[0],),
        )
    return None


def _lost_move(stray: Stray) -> Reason | None:
    """`x.to(device)` as a statement of its own: a tensor is not moved in place."""
    for file, statement in _dropped(stray):
        text = ast.unparse(statement)
        return Reason(
            kind="dropped",
            fact=f"`{text}` moves nothing: for a tensor it returns a copy, which is dropped",
            advice=_kept(file, statement, text),
            place=node_location("cause", file, statement, "the moved copy is dropped here"),
            file=file,
            nodes=(statement,),
        )
    return None


def _kept(file: str, statement: ast.Expr, text: str) -> str:
    name = ast.unparse(statement.value.func.value)  # type: ignore[attr-defined]
    for loop in nodes_in(syntax_tree(file)):
        if isinstance(loop, ast.For) and statement in loop.body:
            is_item = any(ast.unparse(part) == name for part in ast.walk(loop.target))
            rest = loop.body[loop.body.index(statement) + 1 :]
            if is_item and not any(ast.unparse(part) == name for each in rest for part in ast.walk(each)):
                return f"keep the results: put each `{text}` into a new container, and go on with that"
    return f"keep the result: `{name} = {text}`"


def _dropped(stray: Stray) -> Iterator[tuple[str, ast.Expr]]:
    """Statements that copy the stray to another device and drop the copy: as the replay saw them, then by syntax."""
    for spot in stray.trace.copies_of(stray.tensors, stray.device) if stray.trace is not None else ():
        found = node_at(spot)
        tree = syntax_tree(spot.file)
        for statement in nodes_in(tree if found is not None else None):
            if isinstance(statement, ast.Expr) and found is not None and statement.value is found[0]:
                yield spot.file, statement
    for frame in reversed(stray.evidence.frames):
        body = function_body(frame) if frame.is_user else None
        for statement in own_statements(body) if body is not None else ():
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=attr))) if attr in _MOVES:
                    held = read(owner, frame) if isinstance(owner, ast.Name | ast.Attribute | ast.Subscript) else None
                    if any(held is tensor for tensor in stray.tensors) and statement.lineno < frame.line:
                        yield frame.file, statement


def _made_without_device(stray: Stray) -> Reason | None:
    """`torch.zeros(...)` with no `device=` makes a tensor on the CPU; read off the assignment alone."""
    node, frame, origin = stray.placed.node, stray.placed.frame, stray.origin
    if node is None or frame is None or stray.device.type != "cpu":
        return None
    if origin is not None and isinstance(origin.node, ast.expr) and origin.name != ast.unparse(origin.node):
        return None  # a loop header, which names where the values come from and not this one
    made = origin.value if origin is not None and origin.value is not None else node
    calls = [(part, callee(part)) for part in calls_in(made)]
    if any(name in _MOVES for _, name in calls):
        return None
    for call, name in calls:
        given = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if name in MAKERS and not given:
            file = origin.file if origin is not None else frame.file
            return _made_on(stray, name, file, [call], device_words(frame.live) if file == frame.file else ())
    return None


def _made_in_function(stray: Stray) -> Reason | None:
    """A function of the user's returns what a factory makes without a device: `state = model.first_state(16)`."""
    call = stray.origin.value if stray.origin is not None else None
    if not isinstance(call, ast.Call) or stray.device.type != "cpu":
        return None
    functions = (read(call.func, frame) for frame in reversed(stray.evidence.frames))
    code = next((found.__code__ for found in functions if inspect.isfunction(found) or inspect.ismethod(found)), None)
    if code is None or not is_user_file(code.co_filename):
        return None
    body = function_of(syntax_tree(code.co_filename), code)
    returned = [each for each in own_nodes(body) if isinstance(each, ast.Return)] if body is not None else []
    calls = [call for each in returned for call in calls_in(each)]
    given = {keyword.arg for each in calls for keyword in each.keywords}
    if given & {"device", None} or any(callee(each) in _MOVES for each in calls):
        return None
    made = [each for each in calls if callee(each) in MAKERS]
    return _made_on(stray, callee(made[0]), code.co_filename, made[:1], ()) if made else None


def _not_moved(stray: Stray) -> Reason | None:
    """The input was not brought to where the model is."""
    evidence, split, placed, origin = stray.evidence, stray.split, stray.placed, stray.origin
    from_batch = any(member is tensor for member in evidence.incident.batch for tensor in stray.tensors)
    if not from_batch and origin is None:
        return None
    return Reason(
        kind="variable",
        fact=f"`{placed.text}` comes from the DataLoader, which yields batches on {stray.device}"
        if from_batch
        else f"`{placed.text}` was never moved to {split.home}",
        advice=f"move it before it is used: `{placed.text}.to({str(split.home)!r})`",
        place=origin.location("origin", f"`{origin.name}` comes from here") if origin is not None else None,
    )


_EXPLANATIONS = (
    model_left_behind,
    _lost_move,
    _made_in_step,
    _taken_off,
    attribute,
    of_the_class,
    unregistered_layer,
    late_module,
    other_module,
    _made_without_device,
    _made_in_function,
    _not_moved,
)
