"""Everything that the rules may look at when an exception ended the training."""

from __future__ import annotations

import ast
import functools
import itertools
import os
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

from torch import nn

from torchmedic.detect.failures.exceptions import Raised
from torchmedic.detect.failures.exhaustion import Exhaustion, exhaustion_of, exhaustion_of_error, is_out_of_memory
from torchmedic.evidence.devices.cuda_setup import asked_beside
from torchmedic.evidence.raising_operands import replay_operands
from torchmedic.records import Location, Role
from torchmedic.replay.step.step import Step, from_traceback, through_backward, through_returned_loss
from torchmedic.source.live_frames import Frame, frames_of, frames_of_traceback, place
from torchmedic.source.lookup.failing_call import Argument, Call, raising_call
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import is_user_file

if TYPE_CHECKING:
    from torchmedic.evidence.memory.autopsy import Autopsy

_DYNAMO = os.path.join("torch", "_dynamo") + os.sep
_TRIES_OPERATION = ("_get_fake_value_impl", "get_fake_value")
_MAX_WITHOUT_TRACEBACK = 1000  # exceptions, one raised while the other was handled
_MAX_CAUSES = 10


class RaisedEvidence:
    """An exception, its live frames, and the operation that raised it.

    `autopsy` says who held the memory, if the exception is about memory of this process. `examine_memory` takes it,
    before the rules are asked.
    """

    def __init__(self, incident: Raised) -> None:
        self.incident = incident
        self.step_number, self.rank = incident.step, incident.rank
        self.error, self.frames = _root(incident.error)
        worker = incident.worker
        self.message = str(self.error) if worker is None or worker.stage != "other" else worker.message
        self.autopsy: Autopsy | None = None

    def failing_step(self) -> Step:
        """The step up to the statement that failed."""
        return from_traceback(self.error.__traceback__, self.incident.process)

    def step_through_backward(self) -> Step:
        """The step as far as it would have gone backward."""
        return through_backward(frames_of_traceback(self.error.__traceback__), self.incident.process)

    def step_of_library(self) -> Step:
        """The step of a function that a library has called, where the library calls backward."""
        stack = frames_of_traceback(self.error.__traceback__)
        try:
            return through_backward(stack, self.incident.process, by_library=True)
        except CannotCut:
            return through_returned_loss(stack, self.incident.process)

    @functools.cached_property
    def exhaustion(self) -> Exhaustion | None:
        """What the exception says about memory, unless the user's own code has raised it."""
        last = self.frames[-1] if self.frames else None
        if last is not None and last.is_user and isinstance(last.statement, ast.Raise):
            return None
        worker = self.incident.worker
        if worker is not None:
            in_worker = {"MemoryError"} if "MemoryError" in worker.exception else set()
            found = exhaustion_of(self.kinds | in_worker, worker.message)
        elif self.error is self.incident.error:
            found = self.incident.exhaustion
        else:
            found = exhaustion_of_error(self.error)
        return found if found is None or not found.beside else asked_beside(found)

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """Names of the exception's class and its bases."""
        return frozenset(kind.__name__ for kind in type(self.error).__mro__)

    @property
    def kind(self) -> str:
        return type(self.error).__name__

    def says(self, *fragments: str) -> bool:
        """Whether the message holds all of these stable fragments, in any case."""
        text = self.message.lower()
        return all(fragment.lower() in text for fragment in fragments)

    @functools.cached_property
    def call(self) -> Call | None:
        """The operation that raised, from the innermost frame."""
        if self._traced is not None:
            return self._traced
        return raising_call(self.frames[-1]) if self.frames else None

    @functools.cached_property
    def calls(self) -> list[Call]:
        """What every frame was calling, from the innermost one out to the user's own."""
        if self._traced is not None:
            return [self._traced]
        found = []
        for frame in reversed(self.frames):
            call = raising_call(frame)
            if call is not None:
                found.append(call)
            if frame.is_user:
                break
        return found

    def replay_operands(self) -> bool:
        """Replay the step for operands of the raising call that no variable holds; whether all are known now."""
        call = self.calls[0] if self.calls and self.is_torchs else None
        if call is None or call.is_known or self.exhaustion is not None:
            return False
        try:
            return replay_operands(self.failing_step(), self.error, call)
        except CannotCut:
            return False

    def find(self, *ops: str) -> Call | None:
        """The innermost of `calls` that is one of these operations."""
        return next((call for call in self.calls if call.op in ops), None)

    def inside(self, *functions: str) -> Frame | None:
        """The innermost frame of one of these functions of torch's, if the exception came out of it."""
        for frame in reversed(self.frames):
            if frame.is_user:
                return None
            if frame.function in functions and _is_torch(frame):
                return frame
        return None

    @functools.cached_property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code; that of the script where all of it is library code."""
        for frame in reversed(self.frames):
            if frame.is_user and frame is not self.compiled_frame:
                return frame
        return self.frames[0] if self.frames else None

    @functools.cached_property
    def compiled_frame(self) -> Frame | None:
        """The frame of the user's whose compiled code raised: it stands at its first line, whatever it was doing."""
        for frame, inner in itertools.pairwise(self.frames):
            if frame.is_user and frame.line == frame.live.f_code.co_firstlineno and _DYNAMO in inner.file:
                return frame
        return None

    @property
    def library_frames(self) -> list[Frame]:
        """The frames below the user's innermost one, outermost first."""
        for position in range(len(self.frames) - 1, -1, -1):
            if is_user_file(self.frames[position].file):
                return self.frames[position + 1 :]
        return self.frames

    def at_user_line(self, role: Role, label: str = "") -> tuple[Location, ...]:
        """The expression of the user's innermost frame; nothing where no frame is left."""
        remote = self._traced_place(role, label) or self._replica_place(role, label)
        if remote is not None:
            return (remote,)
        if self.user_frame is None:
            return ()
        # Until Python 3.12 the position of a test is that of its whole statement.
        test = getattr(self.user_frame.statement, "test", None) if self.user_frame.node is None else None
        return (self.user_frame.location(role, label, test),)

    @functools.cached_property
    def is_in_library(self) -> bool:
        """Whether a library runs the step: the user's innermost line starts the library, and hands no tensor over."""
        call = raising_call(self.user_frame) if self.user_frame is not None else None
        names = [str(frame.live.f_globals.get("__name__", "")) for frame in self.library_frames]
        return call is not None and not call.tensors and any(not name.startswith("torch.") for name in names)

    @property
    def from_loader(self) -> bool:
        """Whether a worker of a DataLoader raised it: its frames are gone, and it has rules of its own."""
        worker = self.incident.worker
        return worker is not None and worker.stage != "other"

    @property
    def is_torchs(self) -> bool:
        """Whether the words are torch's own: not those of a loader's worker, nor of a `raise` in other code."""
        last = self.frames[-1] if self.frames else None
        raised_elsewhere = last is not None and last.instruction == "RAISE_VARARGS" and not _is_torch(last)
        return not raised_elsewhere and not self.from_loader

    @property
    def is_traced(self) -> bool:
        """Whether `torch.compile` raised it while it looked through the user's code: that code has no live frame."""
        return "TorchDynamoException" in self.kinds

    @functools.cached_property
    def _traced(self) -> Call | None:
        """The operation that the tracer of `torch.compile` was trying on fake tensors, which have real shapes."""
        if not self.is_traced:
            return None
        for frame in reversed(self.frames):
            node, args = frame.variables.get("node"), frame.variables.get("args")
            if frame.function in _TRIES_OPERATION and isinstance(args, tuple):
                target: Any = getattr(node, "target", None)
                op = target if isinstance(target, str) else getattr(target, "__name__", "")
                kwargs = frame.variables.get("kwargs") or {}
                named = [Argument(None, value, name) for name, value in kwargs.items()]
                return Call(frame, op, target, [*(Argument(None, value) for value in args), *named])
        return None

    @functools.cached_property
    def traced_modules(self) -> list[nn.Module]:
        """The modules whose `forward` the tracer of `torch.compile` was looking through, outermost first."""
        tries = [frame for frame in reversed(self.frames) if self.is_traced and frame.function in _TRIES_OPERATION]
        known = tries[0].variables if tries else {}
        stack = getattr(known.get("node"), "meta", {}).get("nn_module_stack") or {}
        local = getattr(getattr(known.get("tx"), "output", None), "local_scope", {})
        found = []
        for path, kind in stack.values():  # such as `L['self'].layers.0`
            name, _, below = str(path).removeprefix("L['").partition("']")
            module = local.get(name)
            for part in below.strip(".").split(".") if below else ():
                module = getattr(module, "_modules", {}).get(part)
            found += [module] if isinstance(module, nn.Module) and type(module) is kind else []
        return found

    def _traced_place(self, role: Role, label: str) -> Location | None:
        stack: list[FrameSummary] = list(getattr(self.error, "real_stack", None) or ()) if self.is_traced else []
        for entry in reversed(stack):
            if is_user_file(entry.filename) and entry.lineno is not None:
                columns = (getattr(entry, "colno", None), getattr(entry, "end_colno", None))
                return place(role, entry.filename, entry.lineno, label, *columns, getattr(entry, "end_lineno", None))
        return None

    def _replica_place(self, role: Role, label: str) -> Location | None:
        """The user's line in a replica of `DataParallel`, which raises again in the main thread."""
        worker = self.incident.worker
        if worker is None or worker.stage != "other":
            return None
        for entry in worker.frames:
            if is_user_file(entry.file):
                start, end = worker.columns
                columns = (None, None) if end <= start else (start - 1, end - 1)
                return place(role, entry.file, entry.line, label, *columns)
        return None


def _is_torch(frame: Frame) -> bool:
    return str(frame.live.f_globals.get("__name__", "")).startswith("torch")


def _root(error: BaseException) -> tuple[BaseException, list[Frame]]:
    """The exception that torch raised in the first place, with its frames.

    Goes past `raise TrainingFailed(...) from error` of the user's own code, past what went wrong while an out-of-memory
    was handled, and past the end of a capture of a CUDA graph that fails because the captured code did.
    """
    for _ in range(_MAX_WITHOUT_TRACEBACK):
        # Where memory ends in small pieces, there is none for a traceback either: the first of them still had some.
        if error.__traceback__ is not None or not is_out_of_memory(error) or error.__context__ is None:
            break
        error = error.__context__
    frames = frames_of(error.__traceback__)
    for _ in range(_MAX_CAUSES):
        inner = error.__cause__ or error.__context__
        last = frames[-1] if frames else None
        inner_frames = frames_of(inner.__traceback__) if inner is not None else []
        if inner is None or last is None or not inner_frames:
            break
        # A second out-of-memory raised while the first was reported replaces it.
        unlike = not is_out_of_memory(error) or not any(frame.is_user for frame in frames)
        for_memory = is_out_of_memory(inner) and unlike
        raised_on = last.is_user and last.instruction == "RAISE_VARARGS"
        ends_capture = last.function == "capture_end" and any(frame.live is inner_frames[0].live for frame in frames)
        if not (raised_on or ends_capture) and not (for_memory and _is_failed_handling(frames, inner_frames)):
            break
        if not (for_memory or ends_capture or _is_torch(inner_frames[-1]) or _has_tensors(inner_frames[-1])):
            break
        caught = next((at for at, frame in enumerate(frames) if frame.live is inner_frames[0].live), 0)
        error, frames = inner, frames[:caught] + inner_frames
    return error, frames


def _is_failed_handling(frames: list[Frame], inner: list[Frame]) -> bool:
    """Whether the handler of an exception itself went wrong: one of a library, or a statement of the user's own.

    What the user's handler goes on to call is another attempt, and has failures of its own.
    """
    caught = next((frame for frame in frames if frame.live is inner[0].live), None)
    if caught is None:
        return False
    return not caught.is_user or (caught is frames[-1] and not _has_tensors(caught))


def _has_tensors(frame: Frame) -> bool:
    call = raising_call(frame)
    return call is not None and bool(call.tensors)
