"""A tensor that was left behind on another device, with all that is known of it."""

from __future__ import annotations

import ast
import functools
from typing import Any, Literal

import msgspec
import torch

from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.devices.device_births import Birth, Trace, Words, replayed
from torchmedic.evidence.devices.placement import Placed, Split, split_between
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.operations import storage_of
from torchmedic.source.bindings import ENTRY, assignments, binds, function_body, header, own_statements
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, raising_call, read
from torchmedic.source.lookup.origins import Origin, origin_of, user_argument
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.syntax import FUNCTIONS

DEPTH = 4  # of containers in containers

Kind = Literal["made", "taken off", "attribute", "container", "layers", "module", "dropped", "variable"]


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a tensor is not where the others are, and what a cure would change."""

    kind: Kind
    fact: str
    advice: str
    place: Location | None = None  # its role is `cause` where a person would change this line, and not the use
    file: str = ""
    nodes: tuple[ast.AST, ...] = ()  # the calls, or the statement, that made it so
    owner: Any = None  # whose attribute it is
    name: str = ""
    module: torch.nn.Module | None = None  # that has to be moved
    words: Words = ()  # for devices, where it was made


class Stray:
    """The tensor that is left behind, with all that is known of it."""

    def __init__(self, evidence: RaisedEvidence, split: Split, placed: Placed, trace: Trace | None) -> None:
        self.evidence = evidence
        self.split = split
        self.trace = trace
        self.births: list[Birth] = trace.births_of(placed.tensor) if trace is not None else []
        self.placed = placed if placed.node is not None else self._passed_in(placed)

    def _passed_in(self, placed: Placed) -> Placed:
        """What the user passed to the layers around the operation, where that is what the stray was made of."""
        for birth in self.births:
            passed = user_argument(self.evidence.frames, birth.leaf) if birth.leaf is not None else None
            if passed is not None and birth.leaf is not None:
                frame, argument = passed
                return Placed(text=argument.text, tensor=birth.leaf, node=argument.node, frame=frame)
        return placed

    @property
    def device(self) -> torch.device:
        return self.placed.device

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor itself, and what it was made of on the same device: `self.mask` in `~self.mask`."""
        found = [self.placed.tensor, *(birth.leaf for birth in self.births if birth.leaf is not None)]
        node, frame = self.placed.node, self.placed.frame
        for part in ast.walk(node) if node is not None and frame is not None else ():
            value = read(part, frame) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) else None  # type: ignore[arg-type]
            if isinstance(value, torch.Tensor) and value.device == self.device:
                found.append(value)
        return found

    @functools.cached_property
    def _storages(self) -> frozenset[int]:
        return frozenset(key for tensor in self.tensors if (key := storage_of(tensor)) is not None)

    def is_in(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether a value is the stray, or a container or plain object that holds it."""
        if isinstance(value, torch.Tensor):
            return any(value is tensor for tensor in self.tensors) or storage_of(value) in self._storages
        if not depth or isinstance(value, torch.nn.Module | type):
            return False
        return any(self.is_in(item, depth - 1) for item in items_of(value))

    @functools.cached_property
    def origin(self) -> Origin | None:
        """The statement that the stray comes from, or the variable that it is a part of."""
        node, frame = self.placed.node or self.placed.holder, self.placed.frame
        if node is None or frame is None:
            return None
        own = origin_of(self.evidence.frames, frame, node)
        if own is not None and own.node is not node:
            return own
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute) and self.is_in(read(part, frame), 0):
                found = (
                    origin_of(self.evidence.frames, frame, part)
                    or _enclosing_origin(part, frame)
                    or _other_binding(part, frame)
                )
                if found is not None:
                    return found
        return own


def items_of(value: Any) -> list[Any]:
    """The items of a container or a plain object (dataclass, namespace); none for other objects."""
    if isinstance(value, dict):
        return list(value.values())[:1000]
    if isinstance(value, list | tuple | set):
        return list(value)[:1000]
    held = getattr(value, "__dict__", None)
    of_torch = type(value).__module__.split(".")[0] in ("torch", "builtins", "types", "functools")
    return list(held.values())[:100] if isinstance(held, dict) and not of_torch and not callable(value) else []


def split_in_replay(evidence: RaisedEvidence, failure: StepFailure) -> Split | None:
    """What the failing operation is given in a replay: an operand that is a call cannot be read off the variables."""
    frame = evidence.user_frame
    call = raising_call(frame) if frame is not None else None
    trace = traced(evidence, failure) if frame is not None and call is not None and call.whole else None
    if frame is None or call is None or trace is None:
        return None
    given = trace.failed
    operands = [each for each in call.flat() if each.value is UNKNOWN or each.tensor is not None]
    if len(operands) != len(given):
        return None  # not this operation, but one that it is made of
    placed = [
        Placed(text=each.text, tensor=tensor, node=each.node, frame=frame)
        for each, tensor in zip(operands, given, strict=True)
    ]
    return split_between(evidence, frame, call, placed)


def traced(evidence: RaisedEvidence, failure: StepFailure) -> Trace | None:
    """The births in a replay up to the failure, also where the frame never goes backward: an evaluation, a library."""
    try:
        return replayed(failure.step or evidence.failing_step(), evidence)
    except CannotCut:
        return None


def strays_of(evidence: RaisedEvidence, split: Split, failure: StepFailure) -> list[Stray]:
    """The tensors that are left behind, followed through a replay of the step where there is one."""
    trace = traced(evidence, failure)
    return [Stray(evidence, split, placed, trace) for placed in split.strays]


def _other_binding(node: ast.expr, frame: Frame) -> Origin | None:
    """The only assignment of a variable besides the failing one, which has not come to pass: `total = total + x`."""
    made = assignments(frame, node.id) if isinstance(node, ast.Name) else []
    others = [statement for statement in made if statement is not frame.statement and statement is not ENTRY]
    return Origin(frame.file, header(others[0]), ast.unparse(node)) if len(others) == 1 else None


def _enclosing_origin(node: ast.expr, frame: Frame) -> Origin | None:
    """The only assignment, in the functions around a closure, of a name that the closure reads."""
    names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    name = next((each for each in names if each in frame.live.f_code.co_freevars), None)
    body = function_body(frame)
    if name is None or body is None or frame.tree is None:
        return None
    around = [
        each
        for each in ast.walk(frame.tree)
        if isinstance(each, FUNCTIONS) and each is not body and any(part is body for part in ast.walk(each))
    ]
    made = [statement for each in around for statement in own_statements(each) if binds(statement, name)]
    return Origin(frame.file, made[0], name) if len(made) == 1 else None
