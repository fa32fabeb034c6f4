"""A function or module calls itself endlessly.

What: Python stops a chain of calls that is deeper than its limit (1000 by default).

Why: a `forward` that calls the module itself instead of one of its layers, two functions that call each other, a
`__getattr__` that reads an attribute which only `__getattr__` provides, or a module that has its own parent as a child:
every function that visits all modules (`.to()`, `.train()`, `.parameters()`) then runs in a circle.

Cure: break the circle at the line shown. Store a parent in a way that does not register it as a module: with a plain
function or a weak reference.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.data_loading import loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, StackFrame
from torchmedic.source.bindings import function_body
from torchmedic.source.live_frames import Frame, frames_of, node_location, place
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.objects.parts import attributes
from torchmedic.source.syntax import FUNCTIONS, has_line
from torchmedic.source.user_code import is_user_file, relative

_PLAIN = ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr
_OPEN = ast.IfExp | ast.BoolOp | ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp
_LEAVES = ast.Return | ast.Raise | ast.Assert | ast.Yield
_MAX_TURN_FRAMES = 60
_MIN_TURNS = 3
_MIN_CHAIN = 20  # objects in a row


@rule("TM840", "recursion-limit")
def check(evidence: RaisedEvidence) -> Draft | None:
    worker = evidence.incident.worker
    if not isinstance(evidence.incident.error, RecursionError) and (
        worker is None or worker.exception != "RecursionError"
    ):
        return None
    frames = [] if worker is not None else frames_of(evidence.incident.error.__traceback__)
    stack = [StackFrame(file=frame.file, line=frame.line, function=frame.function) for frame in frames]
    cycle = cycle_in(list(reversed(worker.frames)) if worker is not None else stack)
    if cycle is None:
        return None
    held = _holds_itself(frames[cycle.start :]) if frames else None
    if held is not None:
        return _module_circle(evidence, cycle, held)
    own = [frame for frame in cycle.turn if is_user_file(frame.file)]
    chain = _chain(frames[cycle.start :]) if not own else None
    if chain is not None:
        return _long_chain(evidence, cycle, frames, *chain)
    back = own[-1] if own else None
    names = list(dict.fromkeys(frame.function for frame in own or cycle.turn))
    circle = f"`{names[0]}` calls itself" if len(names) == 1 else f"`{names[0]}` calls itself through `{names[1]}`"
    endless = back is not None and _is_endless([frame for frame in frames[cycle.start :] if frame.is_user][: len(own)])
    draft = check.draft(evidence, "proven" if back is not None else "likely")
    draft.message = f"{circle} " + (
        "without end" if endless else f"deeper than Python's limit of {sys.getrecursionlimit()}"
    )
    draft.cause = (
        f"a round of {count(len(cycle.turn), 'call')} repeats {'at least ' if worker else ''}{cycle.turns} times"
    )
    if back is not None:
        live = next((frame for frame in frames[cycle.start :] if _is_at(frame, back)), None)
        label = f"`{names[0]}` is called again here"
        draft.at(live.location("cause", label) if live is not None else place("cause", back.file, back.line, label))
        first = next((frame for frame in reversed(frames[: cycle.start]) if frame.is_user), None)
        draft.mark(first, "surfaced", "it begins here")
    else:
        draft.at(*_begun(frames, cycle))
    if (loading := loading_of(evidence)) is not None and worker is not None:
        draft.at(loading.at_loop("surfaced", "the batch was asked for here")).because(loading.process)
    for frame in own[:6] if len(own) > 1 else ():
        draft.because(f"in the circle: {relative(frame.file)}:{frame.line} in `{frame.function}`")
    draft.because(*_same_object(frames, cycle, back))
    if (cure := _own_lookup(draft, frames)) is not None:
        return draft.help(cure)
    return draft.help("call another function at this line, or add a condition that ends the recursion")


def _own_lookup(draft: Draft, frames: list[Frame]) -> str | None:
    """The cure of a `__getattr__` that reads an attribute of its own object which only `__getattr__` can find."""
    frame = next((frame for frame in reversed(frames) if frame.is_user), None)
    if frame is None or frame.function != "__getattr__" or frame.live.f_code.co_argcount != 2:
        return None
    owner, name = (frame.variables.get(each) for each in frame.live.f_code.co_varnames[:2])
    own = getattr(owner, "__dict__", {})
    if not isinstance(name, str) or name in own:
        return None
    if any(name in own.get(held, ()) for held in ("_modules", "_parameters", "_buffers")):
        draft.because(f"`nn.Module.__getattr__` finds `{name}`; this `__getattr__` has taken its place")
        return "ask `super().__getattr__(name)` first, and go on only if that raises AttributeError"
    draft.because(
        f"the object has no `{name}`; a copy, or an object that is being unpickled, begins without attributes"
    )
    return f"raise AttributeError where the name is `{name}`"


def _long_chain(evidence: RaisedEvidence, cycle: Cycle, frames: list[Frame], kind: type, name: str) -> Draft:
    """A library goes from object to object: the objects are too many in a row, and no code of the user's recurses."""
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`{cycle.turn[0].function}` goes down a chain of `{kind.__name__}` objects, deeper than Python's limit of "
        f"{sys.getrecursionlimit()}"
    )
    draft.cause = f"each `{kind.__name__}` holds the next one as `{name}`, and takes {count(len(cycle.turn), 'call')}"
    draft.at(*_begun(frames, cycle))
    assigned = next(attribute_assignments(kind, name), None)
    draft.at(node_location("origin", *assigned, "the chain is made here") if assigned is not None else None)
    return draft.help("keep the items in a list or a `deque`, or leave the chain out of what is handed over here")


def _chain(frames: list[Frame]) -> tuple[type, str] | None:
    """The class of the user's of which many objects are walked through, and the attribute that leads to the next."""
    found: dict[type, dict[int, object]] = {}
    for frame in frames:
        for value in frame.variables.values():
            kind = type(value)
            module = sys.modules.get(kind.__module__)
            if is_user_file(str(getattr(module, "__file__", None) or "<unknown>")):
                found.setdefault(kind, {})[id(value)] = value
    for kind, objects in found.items():
        for value in objects.values() if len(objects) >= _MIN_CHAIN else ():
            for name, held in attributes(value, kind):
                if id(held) in objects and held is not value:
                    return kind, name
    return None


def _is_endless(turn: list[Frame]) -> bool:
    """Whether nothing in a round could have stopped it: every call of it is made whatever happens."""
    for frame in turn:
        body = function_body(frame)
        statements = body.body if isinstance(body, FUNCTIONS) else []
        before = [each for each in statements if (each.end_lineno or each.lineno) < frame.line]
        here = [each for each in statements if has_line(each, frame.line)]
        if not here or not all(isinstance(each, _PLAIN) for each in here):
            return False
        if any(isinstance(part, _OPEN) for each in here for part in ast.walk(each)):
            return False
        if any(isinstance(part, _LEAVES) for each in before for part in ast.walk(each)):
            return False
    return bool(turn)


def _is_at(frame: Frame, entry: StackFrame) -> bool:
    return (frame.file, frame.line, frame.function) == (entry.file, entry.line, entry.function)


def _begun(frames: list[Frame], cycle: Cycle) -> tuple[Location, ...]:
    first = next((frame for frame in reversed(frames[: cycle.start + 1]) if frame.is_user), None)
    return (first.location("cause", "the recursion begins here"),) if first is not None else ()


def _same_object(frames: list[Frame], cycle: Cycle, back: StackFrame | None) -> tuple[str, ...]:
    """Whether the rounds work on one and the same object, so that no round can be the last."""
    if back is None:
        return ()
    rounds = [frame for frame in frames[cycle.start :] if _is_at(frame, back)][:3]
    owners = {id(frame.variables.get("self")) for frame in rounds}
    owner = rounds[0].variables.get("self") if rounds else None
    return (
        (f"every round is on the same `{type(owner).__name__}` object",)
        if owner is not None and len(owners) == 1
        else ()
    )


def _holds_itself(frames: list[Frame]) -> tuple[torch.nn.Module, str, torch.nn.Module] | None:
    """A module that is reached again from one of its own children: the child, the name, and the module."""
    walked = [frame.module for frame in frames if frame.module is not None][:200]
    for module in {id(each): each for each in walked}.values():
        for owner in {id(each): each for each in walked}.values():
            for name, child in owner._modules.items():
                if child is module and owner is not module and _reaches(module, owner):
                    above = [index for index, each in enumerate(walked) if each is module]
                    below = [index for index, each in enumerate(walked) if each is owner]
                    if above and below and above[0] < below[0]:
                        return owner, name, module
                if child is module and owner is module:
                    return owner, name, module
    return None


def _reaches(module: torch.nn.Module, wanted: torch.nn.Module) -> bool:
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each is wanted:
            return True
        waiting += [child for child in each._modules.values() if child is not None]
    return False


def _module_circle(evidence: RaisedEvidence, cycle: Cycle, held: tuple[torch.nn.Module, str, torch.nn.Module]) -> Draft:
    owner, name, module = held
    who, whom = type(owner).__name__, type(module).__name__
    draft = check.draft(evidence, "proven")
    draft.message = f"`{who}.{name}` is the `{whom}` that holds it: the modules form a circle"
    draft.cause = (
        f"`{cycle.turn[0].function}` walks over all submodules and comes back to the same `{whom}` again and again"
    )
    made = list(attribute_assignments(type(owner), name))
    inner = "itself" if owner is module else f"its own `{who}`"
    if made:
        draft.at(node_location("cause", *made[0], f"the `{whom}` becomes a submodule of {inner}"))
        draft.at(*evidence.at_user_line("surfaced", "noticed here"))
    else:
        draft.at(*evidence.at_user_line("cause", "this walks in a circle"))
    return draft.help(
        f"keep `{name}` out of the submodules: `object.__setattr__(self, {name!r}, ...)` or a weak reference"
    )


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """`turn` is one round of the recursion, outermost frame first: its last frame calls its first function again."""

    turn: tuple[StackFrame, ...]
    start: int  # position of the first round in the stack, outermost frame counted as 0
    turns: int


def cycle_in(stack: Sequence[StackFrame]) -> Cycle | None:
    """The recursion at the end of a stack (outermost frame first), if it went round at least three times."""
    for ending in range(min(_MAX_TURN_FRAMES, len(stack))):
        # The limit may be hit in the middle of a round, or in a helper that the round calls.
        whole = stack[: len(stack) - ending]
        for length in range(1, min(_MAX_TURN_FRAMES, len(whole) // _MIN_TURNS) + 1):
            if not all(_same(whole[-1 - at], whole[-1 - at - length]) for at in range(length * (_MIN_TURNS - 1))):
                continue
            start = len(whole) - length
            while start > 0 and _same(whole[start - 1], whole[start - 1 + length]):
                start -= 1
            return Cycle(turn=tuple(whole[start : start + length]), start=start, turns=(len(whole) - start) // length)
    return None


def _same(one: StackFrame, two: StackFrame) -> bool:
    return one == two
