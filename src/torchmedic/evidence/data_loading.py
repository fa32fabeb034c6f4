"""A batch that could not be had: what failed, in which process, and the user's lines that take part in it."""

from __future__ import annotations

import ast
import inspect
import os
from types import CodeType
from typing import Any

from torch.utils.data import DataLoader

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.failures.worker_failures import describe, is_fetch
from torchmedic.records import Location, Role, StackFrame, WorkerFailure
from torchmedic.source.bindings import assignment_before, own_statements
from torchmedic.source.live_frames import Frame, frames_of, node_location, place
from torchmedic.source.syntax import FUNCTIONS, function_of, syntax_tree
from torchmedic.source.user_code import is_user_file

_DATALOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_DEEPEST = 8  # datasets wrapped in each other
_MIN_ITEMS = 2  # of a batch, to tell one of them from the others


class Request:
    """A batch that the user's loop asked for, and the user's lines behind it."""

    def __init__(self, frames: list[Frame], iterator: Any) -> None:
        self.iterator = iterator
        self.dataset = getattr(iterator, "_dataset", None)
        asked = next((at for at, frame in enumerate(frames) if frame.file.endswith(_DATALOADER)), len(frames))
        self._outer = [frame for frame in frames[:asked] if frame.is_user]

    @property
    def file(self) -> str:
        """The user's file that asked for the batch."""
        return self._outer[-1].file if self._outer else ""

    def at_loop(self, role: Role, label: str) -> Location | None:
        """The line of the main process that asked for the batch."""
        return self._outer[-1].location(role, label) if self._outer else None

    def at_samples(self, role: Role, label: str, *, nothing: bool = False) -> Location | None:
        """The line of the user's dataset that hands a sample out, or None as a sample."""
        code = samples_code(self.dataset)
        return None if code is None else _handing_out(code, role, label, nothing)

    def at_method(self, role: Role, label: str) -> Location | None:
        """The head of the user's method that makes the samples."""
        code = samples_code(self.dataset)
        method = function_node(code) if code is not None else None
        return place(role, code.co_filename, method.lineno, label) if code is not None and method is not None else None

    def at_loader(self, role: Role, label: str) -> Location | None:
        """The line on which the user built the DataLoader."""
        for frame in reversed(self._outer):
            for name, value in [*frame.variables.items(), *frame.live.f_globals.items()]:
                if isinstance(value, DataLoader) and value.dataset is self.dataset:
                    made = assignment_before(frame, name)
                    if isinstance(made, ast.stmt):
                        return node_location(role, frame.file, made, label)
        return None


class Loading(Request):
    """An exception on the way from a dataset to the user's loop."""

    def __init__(self, failure: WorkerFailure, frames: list[Frame]) -> None:
        super().__init__(frames, iterator_in(frames))
        self.failure = failure

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost line of the user's own between the DataLoader and the exception."""
        return next((frame for frame in self.failure.frames if is_user_file(frame.file)), None)

    def at_user_frame(self, role: Role, label: str) -> Location | None:
        frame = self.user_frame
        if frame is None:
            return None
        start, end = self.failure.columns
        columns = (start - 1, end - 1) if end > start else (None, None)
        return place(role, frame.file, frame.line, label, *columns)

    @property
    def process(self) -> str:
        worker = self.failure.worker
        if worker is None:
            return "in the main process"
        many = len(getattr(self.iterator, "_workers", ()))
        return f"in worker {worker}{f' of {many}' if many else ''} (process {self.failure.pid})"


def iterator_in(frames: list[Frame]) -> Any:
    """The iterator of a DataLoader whose method is on the stack."""
    for frame in frames:
        owner = frame.variables.get("self") if frame.file.endswith(_DATALOADER) else None
        if hasattr(owner, "_dataset"):
            return owner
    return None


def loading_of(evidence: RaisedEvidence) -> Loading | None:
    """The failed batch behind an exception; None where no DataLoader takes part."""
    error = evidence.incident.error
    frames = frames_of(error.__traceback__)
    failure = evidence.incident.worker
    if failure is not None:
        of_loader = failure.worker is not None or "in pin memory thread" in str(error)[:200]
        return Loading(failure, frames) if of_loader else None
    if any(is_fetch(frame.file) for frame in frames):
        return Loading(describe(error, None), frames)
    return None


def batch_under_way(evidence: RaisedEvidence) -> str:
    """Which sample of a batch was being read in this process; empty where none was, or it is not known."""
    fetch = next((frame for frame in evidence.frames if is_fetch(frame.file)), None)
    if fetch is None:
        return ""
    failure = describe(evidence.error, None)
    batch = failure.batch_indices
    if failure.stage != "sample" or failure.index not in batch or len(batch) < _MIN_ITEMS:
        return ""
    position = batch.index(failure.index) + 1
    return f"it was sample {position} of a batch of {len(batch)}, which is held until it is complete"


def samples_code(dataset: Any) -> CodeType | None:
    """The user's own `__getitem__` (or `__iter__`) behind a dataset, also inside torch's wrappers."""
    for _ in range(_DEEPEST):
        for name in ("__getitems__", "__getitem__", "__iter__"):
            method = inspect.getattr_static(type(dataset), name, None)
            code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
            if isinstance(code, CodeType) and is_user_file(code.co_filename):
                return code
        held = getattr(dataset, "__dict__", {})
        inner = held.get("dataset") or held.get("datasets")
        if inner is None:
            return None
        dataset = inner[0] if isinstance(inner, list | tuple) else inner
    return None


def _handing_out(code: CodeType, role: Role, label: str, nothing: bool) -> Location | None:
    """The last `return` of a method (or `yield` of a generator), one that is not inside an `if` first."""
    function = function_node(code)
    if function is None:
        return None
    statements = list(own_statements(function))
    wanted: list[ast.stmt] = (
        [each for each in statements if nothing and isinstance(each, ast.Return) and _is_none(each.value)]
        or [each for each in function.body if isinstance(each, ast.Return)]
        or [each for each in statements if isinstance(each, ast.Return) and each.value is not None]
        or [
            each
            for each in statements
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Yield | ast.YieldFrom)
        ]
    )
    return node_location(role, code.co_filename, wanted[-1], label) if wanted else None


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def function_node(code: CodeType) -> FUNCTIONS | None:
    return function_of(syntax_tree(code.co_filename), code)
