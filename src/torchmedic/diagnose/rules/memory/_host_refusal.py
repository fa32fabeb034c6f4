"""An allocation of the host's memory that was refused: how much it was, what it was for, and where."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import inspect
import math
import os
import re
import resource
import threading
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch

from torchmedic.detect.failures.exhaustion import asked_of_host
from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.memory._table import differentiated, most_held, noticed, shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.data_loading import batch_under_way, loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.result_sizes import Result, results_of
from torchmedic.evidence.memory.wanted_graphs import in_parts, is_wanted
from torchmedic.observe.memory import headroom
from torchmedic.observe.memory.host import HostMemory, host_memory
from torchmedic.observe.memory.limits import Bound, refusing
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, Call
from torchmedic.source.lookup.loader_lines import LOST, lost_on_its_way
from torchmedic.source.syntax import callee

_THREAD, _LIBRARY = "can't start new thread", "failed to map segment from shared object"
_READS = frozenset({"read", "readall", "readlines"})
_MIN_BYTES = 1 << 20
_COLLECTORS = frozenset("list tuple set frozenset dict sorted array asarray stack concatenate cat".split())
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_HEAP_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
_MIN_SHARE_OF_PEAK = 0.25  # of the most that the process ever had in memory
_PIECE = 8  # what is asked for is at most this part of what went away


class HostRefusal:
    """One refused allocation, in words that the rules about the host's memory share."""

    def __init__(self, evidence: RaisedEvidence, asked: int | None = None) -> None:
        self.evidence = evidence
        self.autopsy = evidence.autopsy
        worker = evidence.incident.worker
        text = worker.message if worker is not None else evidence.message
        made = [each for each in (results_of(evidence.calls) if worker is None else []) if each.nbytes > 1 << 20]
        self.asked = asked or asked_of_host(text)
        self._read = None
        if self.asked is None and "MemoryError" in evidence.kinds:
            self._read = file_read(evidence.call) if worker is None else None
            self.asked = made[0].nbytes if made else self._read.nbytes if self._read is not None else None
        asked = self.asked
        self._made = [each for each in made if asked is not None and _about(each.nbytes, asked)]
        self.overflow = re.search(r"overflowed with sizes=(\[[\d, ]+\])", text)
        self.memory: HostMemory = _of_worker(worker.sizes) if worker is not None and worker.sizes else host_memory()

    @property
    def is_unseen(self) -> bool:
        """Whether there should have been a table, and was no memory for it."""
        evidence = self.evidence
        return self.autopsy is None and evidence.incident.worker is None and evidence.exhaustion is not None

    @functools.cached_property
    def bound(self) -> Bound | None:
        """The limit of the process that it ran into."""
        return refusing(self.memory, self.asked) if self.overflow is None else None

    @functools.cached_property
    def grown(self) -> Result | None:
        """Two operands that look alike, grown into a table of all pairs."""
        return next((each for each in self._made if _is_accident(each)), None)

    @property
    def what(self) -> str:
        """The allocation that failed, in words."""
        if self.grown is not None:
            one, two = (str(list(shape)) for shape in self.grown.operands)
            return f"{one} and {two} broadcast to {list(self.grown.shape)}, which takes {size(self.grown.nbytes)}"
        if self.overflow is not None:
            return f"a tensor of {self.overflow[1]} is larger than any memory"
        if self.asked is None:
            return ""
        if self._read is not None:
            return f"there is no memory for {size(self.asked)}, all of {self._read.name or 'the file'}"
        failing = self.autopsy.failing if self.autopsy is not None else None
        shape = failing.shape if failing is not None else self._made[0].shape if self._made else None
        return f"there is no memory for {size(self.asked)}" + (f", a tensor of {list(shape)}" if shape else "")

    def place(self, draft: Draft) -> None:
        """The line that holds most first, then where it was refused."""
        worker, loading = self.evidence.incident.worker, loading_of(self.evidence)
        if worker is not None and loading is not None:
            draft.at(loading.at_user_frame("cause", "refused here"))
            draft.at(loading.at_loop("surfaced", "the batch was requested here"))
            draft.because(loading.process)
        elif (made := self._unfinished) is not None:
            draft.at(made.frame.location("cause", "everything that is made here stays in memory until the loop ends"))
            draft.at(*noticed(self.autopsy) if self.autopsy is not None else ())
            draft.because(f"{size(made.gone)} went away when it failed: no name led to what was being collected")
        elif self.autopsy is not None and (most := most_held(self.autopsy)) is not None:
            draft.at(most, differentiated(self.autopsy), *noticed(self.autopsy))
        elif self.evidence.user_frame is not None and self.evidence.user_frame.is_user:
            label = f"{size(self.asked)} asked for here" if self.asked is not None else "refused here"
            draft.at(*self.evidence.at_user_line("cause", label))
        elif threading.current_thread() is not threading.main_thread():  # that of a queue
            draft.at(*lost_on_its_way("its workers run under this limit")).because(LOST)

    @functools.cached_property
    def _unfinished(self) -> Unfinished | None:
        """A list that was still being made, unless something that has a name holds more."""
        made = unfinished_list(self.evidence, self.asked)
        top = next(iter(self.autopsy.holders()), None) if self.autopsy is not None else None
        return made if made is not None and (top is None or top[1] < made.gone) else None

    def hold(self, draft: Draft) -> str:
        """Say what the process and its variables hold; return what to do about one that keeps graphs alive."""
        memory, autopsy = self.memory, self.autopsy
        if memory.cgroup_limit is not None:
            draft.because(f"its cgroup may hold {size(memory.cgroup_limit)}")
        if autopsy is None:
            if memory.resident is not None:
                who = "the worker" if self.evidence.incident.worker is not None else "the process"
                draft.because(f"{who} holds {size(memory.resident)}")
            return ""
        shown(draft, autopsy, limits=False)
        draft.because(batch_under_way(self.evidence))
        kept = next(iter(autopsy.retained), None)
        if kept is None or not kept.is_container or kept.nbytes <= autopsy.book.everything // 10:
            return ""
        if is_wanted(kept, self.evidence):
            return in_parts(kept) if kept.is_of_parts else ""
        return f"keep numbers in `{kept.holder.path}` (`.item()`), or detached tensors: each holds its whole graph"


def refusal_of_host(evidence: RaisedEvidence) -> HostRefusal | None:
    """The refusal that an exception is about; None if the exception is not about memory of the host."""
    if evidence.exhaustion is not None:
        return HostRefusal(evidence) if evidence.exhaustion.where == "host" else None
    if evidence.kinds & {"RuntimeError", "ImportError"} and evidence.says(_THREAD):
        return _certain(HostRefusal(evidence, _stack_bytes()))
    if "ImportError" in evidence.kinds and evidence.says(_LIBRARY):
        return _certain(HostRefusal(evidence))
    return None


def _certain(refusal: HostRefusal) -> HostRefusal | None:
    """The refusal, if a limit was reached for certain: the words alone do not speak of memory."""
    return refusal if refusal.bound is not None and refusal.bound.certain else None


def _stack_bytes() -> int:
    """The address space that the stack of a thread needs."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return threading.stack_size() or (limit if 0 < limit < 1 << 30 else 2 << 20)


def _of_worker(sizes: dict[str, int]) -> HostMemory:
    """The host as it is, with the sizes and limits of the process that failed."""
    return msgspec.structs.replace(
        host_memory(),
        resident=sizes.get("VmRSS"),
        address_space=sizes.get("VmSize"),
        address_peak=sizes.get("VmPeak"),
        data=sizes.get("VmData"),
        address_limit=sizes.get("RLIMIT_AS"),
        data_limit=sizes.get("RLIMIT_DATA"),
    )


def _about(nbytes: int, asked: int) -> bool:
    """Whether two sizes are equal up to the rounding of the allocator and of the message."""
    return abs(nbytes - asked) <= max(64, asked // 100)


def _is_accident(result: Result) -> bool:
    """Whether two operands that look alike grew into a table of all pairs, as [N, 1] and [N] do."""
    if len(result.operands) != 2:
        return False
    one, two = result.operands
    stretched = len(one) != len(two) or 1 in one or 1 in two
    try:
        paired = tuple(torch.broadcast_shapes(one, two)) == result.shape  # and not multiplied as matrices
    except RuntimeError:
        return False
    return stretched and paired and math.prod(result.shape) >= 16 * max(math.prod(one), math.prod(two))


class FileRead(NamedTuple):
    name: str
    nbytes: int  # that were asked for


def file_read(call: Call | None) -> FileRead | None:
    """The file whose rest was asked for by a call; None where it is small, or no file, or only a part was wanted."""
    owner = getattr(call.function, "__self__", None) if call is not None else None
    if call is None or call.op not in _READS or not hasattr(type(owner), "fileno"):
        return None
    given = [each.value for each in call.arguments if each.value is not owner]
    if given and given[0] not in (None, -1) and given[0] is not UNKNOWN:
        return None
    with contextlib.suppress(Exception):
        nbytes = _rest_of(owner)
        return FileRead(os.path.basename(str(getattr(owner, "name", ""))), nbytes) if nbytes >= _MIN_BYTES else None
    return None


def _rest_of(file: Any) -> int:
    if file.closed:  # by the `with` that the exception has left: it had just been opened, mostly
        return os.stat(file.name).st_size
    size, begun = os.fstat(file.fileno()).st_size, os.lseek(file.fileno(), 0, os.SEEK_CUR)
    return size - begun if begun < size else size  # all was read, and there was no memory to make a text of it


class Unfinished(NamedTuple):
    """A list that was still being made when memory ran out: no name leads to it, and the exception has freed it.

    `rows = [parse(line) for line in file]` and `data = list(read())` hold everything that they have made until they
    are done. The failing line asks for the next piece; the line that fills the memory is the one that collects them.
    """

    frame: Frame
    gone: int  # bytes that went away with it


def unfinished_list(evidence: RaisedEvidence, asked: int | None) -> Unfinished | None:
    """The line that was collecting, if much of the memory went away when it failed."""
    sizes = headroom.sizes()
    most, now = sizes.get("VmHWM", 0), sizes.get("VmRSS", 0)
    gone = max(0, most - now) + _free_in_heap()
    if gone < _MIN_SHARE_OF_PEAK * most or (asked or 0) * _PIECE > gone:
        return None
    for frame, inner in reversed(list(pairwise(evidence.frames))):
        if frame.is_user and (_comprehends(frame) or (_collects(frame) and _gives_pieces(inner))):
            return Unfinished(frame, gone)
    return None


class _Heap(ctypes.Structure):
    """The numbers that `mallinfo2` of the C library gives."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _HEAP_FIELDS]


def _free_in_heap() -> int:
    """Bytes that were freed and not given back: there were none when a small piece was refused."""
    with contextlib.suppress(AttributeError, OSError):  # another C library, or an older one
        ask = ctypes.CDLL(None).mallinfo2
        ask.restype = _Heap
        return int(ask().fordblks)
    return 0


def _comprehends(frame: Frame) -> bool:
    if frame.function in _COMPREHENSIONS:
        return True
    node, statement = frame.node, frame.statement
    if node is None or statement is None:
        return False
    inside = (each for each in ast.walk(statement) if isinstance(each, ast.ListComp | ast.SetComp | ast.DictComp))
    return any(node in set(ast.walk(each)) - set(ast.walk(each.generators[0].iter)) for each in inside)


def _collects(frame: Frame) -> bool:
    call = frame.node
    if not isinstance(call, ast.Call):
        return False
    name = callee(call)
    return name in _COLLECTORS or name == "join"


def _gives_pieces(frame: Frame) -> bool:
    return bool(frame.live.f_code.co_flags & inspect.CO_GENERATOR)
