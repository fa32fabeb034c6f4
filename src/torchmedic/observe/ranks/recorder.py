"""Notes every collective that is called from Python, in the ring of this rank.

torch's own Flight Recorder is lost with a process that is killed, keeps no `send` and `recv` of gloo, and does not
exist for gloo before torch 2.8. What this recorder cannot see are calls that torch makes in C++ (the buckets of
DistributedDataParallel): those are read from the Flight Recorder (`flight_recorder.py`) while the process lives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import time
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor

from torchmedic.contained import contained, report_fault
from torchmedic.observe.hooks import patches
from torchmedic.observe.ranks.call_site import CallSites
from torchmedic.observe.ranks.contents import METHODS, SENT_SECOND, contents, is_into_one
from torchmedic.observe.ranks.facts import FactsOfRank
from torchmedic.observe.ranks.store_mail import StoreMail
from torchmedic.observe.step.blackbox import mapped, memory_file
from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, FORWARD, WRAPPED, HandledException, Leaving
from torchmedic.runfolder.files import HANDLED, LEAVING, write_atomically
from torchmedic.runfolder.ring import FILE, SIZE, Ring, described, memory_name
from torchmedic.source.user_code import user_frame

_MAX_KNOWN = 4096  # descriptions kept
_MAX_HANDLED, _MAX_TEXT = 4, 200  # calls that are noted while one exception is handled, and letters of its text
_WRAPPING = "_verify_param_shape_across_processes"  # called by the `__init__` of DistributedDataParallel

_ROOTED, _TO_ONE = frozenset({"broadcast", "reduce", "gather", "scatter"}), frozenset({"send", "recv"})
_is_grad_enabled = torch.is_grad_enabled


class Marks:
    """The entries of one DistributedDataParallel: a forward and a backward in its group.

    The backward tells models apart by size. All models of a group are counted together.
    """

    __slots__ = ("backward", "counts", "forward", "model")

    def __init__(self, module: Any, counts: list[int]) -> None:
        name, size = module.process_group.group_name, sum(each.numel() for each in module.parameters())
        self.model = weakref.ref(module)
        self.counts = counts
        self.forward = described(FORWARD, name, (), (), None)
        self.backward = described(BACKWARD, name, ((size,),), (), None)


class Recorder:
    """One per process.

    Args:
        folder: Is asked when this process joins a job, with its rank there and the world size.
        hand_over: Sends a memory file to the parent process under a name; whether it was sent.
    """

    def __init__(
        self, folder: Callable[[int, int], Path | None], hand_over: Callable[[int, str], bool] = lambda *_: False
    ) -> None:
        self._folder = folder
        self._hand_over = hand_over
        self.facts: FactsOfRank | None = None
        self.mail: StoreMail | None = None
        self._ring: Ring | None = None
        self._sites = CallSites()
        self.reducing: Marks | None = None  # of a DistributedDataParallel whose backward has yet to come
        self._models: dict[int, Marks] = {}  # by identity
        self._texts: dict[Any, bytes] = {}
        self._counts: dict[str, int] = {}
        self._threads: dict[int, int] = {}  # the number of each thread that calls collectives
        self._passes: dict[str, list[int]] = {}  # by group: how many forwards and backwards
        self._shut = False
        self._path: Path | None = None
        self._has_left = False
        self._handled = 0, 0  # the identity of an exception, and how many calls were made while it was handled
        self.paused = False  # while a replay runs, whose calls reach no other rank
        self._note_safely = contained("observe.ranks")(self._note)

    def install(self) -> None:
        group = getattr(torch.distributed, "ProcessGroup", None)
        if group is None:
            return  # torch was built without torch.distributed
        for method, op in METHODS.items():
            if method in vars(group):
                patches.wrap(group, method, functools.partial(self._around, op))
        made = sys.modules["torch.distributed.distributed_c10d"]
        if hasattr(made, "_new_process_group_helper"):
            patches.wrap(made, "_new_process_group_helper", self._around_start)
        wrapper = torch.nn.parallel.DistributedDataParallel
        wrapping = sys.modules[wrapper.__module__]
        if hasattr(wrapping, _WRAPPING):
            patches.notice(wrapping, _WRAPPING, self._wraps)
        if hasattr(wrapper, "_pre_forward"):
            patches.notice(wrapper, "_pre_forward", self._goes_forward)
        if hasattr(made, "_new_group_with_tag"):
            patches.notice(made, "_new_group_with_tag", self._makes_group)
        if hasattr(made, "_update_default_pg"):
            patches.notice(made, "_update_default_pg", self._sets_default_group)

    def forked(self) -> None:
        """In a forked child: the ring is the parent's."""
        self._ring = self.facts = self.mail = self.reducing = None
        self._sites.clear()
        for known in (self._counts, self._models, self._passes):
            known.clear()
        self._shut = self._has_left = False

    def _around(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._note_safely

        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:  # known by name to `flight_recorder.py`
            note(op, group, args, kwargs)
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise
            if op == "all_reduce" and self.facts is not None and self.facts.begins and not self.paused:
                self.facts.exchanging(work, args[0] if args else None)
            return work

        return collective

    def _around_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A rank that leaves all calls to DistributedDataParallel has a ring too: it says that the rank is there."""
        begin = contained("observe.ranks")(self._begin)

        @functools.wraps(original)
        def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            try:
                made = original(*args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise
            begin(*args[:5])
            return made

        return _new_process_group_helper

    def _begin(self, size: int = 0, rank: int = 0, members: Any = (0,), backend: Any = None, store: Any = None) -> None:
        if not members and size > 1 and self._ring is None:  # the default group
            self.mail = StoreMail(store)
            self._open(rank, size)

    def _goes_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of DistributedDataParallel, whose backward calls collectives: it tells of a backward left out."""
        module = args[0]
        if not _is_grad_enabled() or patches.is_traced() or patches.compiler._is_compiling_flag:
            return
        if not module.require_backward_grad_sync:
            if self.facts is not None and self.facts.begins:
                self.facts.forward_alone(sys._getframe(2))
        else:
            marks = self._models.get(id(module))
            if marks is None or marks.model() is not module:
                marks = self._marks_of(module)
            self.reducing = marks
            if marks is not None:
                self._mark(marks.forward, marks.counts, 0)
            if self.facts is not None:
                self.facts.forward(args, kwargs)

    def _wraps(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A DistributedDataParallel is made. A frame around all of its `__init__` would show in torch's warnings.

        Its parameters are sent in C++, and must have the same dtypes on all ranks: one parameter of each is noted. Its
        buffers are sent along, and must have the same sizes.
        """
        self._note_wrapped(args[0], args[1], sys._getframe(2))
        if self.facts is not None:
            self.facts.wrapped(sys._getframe(2))

    def backward_begins(self) -> None:
        """The backward of a DistributedDataParallel: it stands for the collectives in it if the process is killed."""
        marks, self.reducing = self.reducing, None
        if marks is not None:
            self._mark(marks.backward, marks.counts, 1)

    def _makes_group(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not kwargs.get("use_local_synchronization"):  # else only the members of the group make this call
            self._note_safely("new_group", None, args, kwargs)

    def _sets_default_group(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args == (None,):
            self.leaves("destroy_process_group()", sys._getframe(2))

    @contained("observe.ranks")
    def leaves(self, how: str, frame: FrameType, *, has_failed: bool = False, otherwise: Path | None = None) -> None:
        """This rank leaves the job by itself: others may wait. `otherwise` is its folder if it has not joined."""
        own, path = user_frame(frame), self._path or otherwise
        if own is None or path is None or self._has_left or self.paused:
            return
        self._has_left = True
        line = StackFrame(file=own.f_code.co_filename, line=own.f_lineno, function=own.f_code.co_name)
        error = sys.exc_info()[1]
        handled = _told(error) if isinstance(error, Exception) else None
        leaving = Leaving(how=how, frame=line, handled=handled, has_failed=has_failed)
        write_atomically(path / LEAVING, msgspec.json.encode(leaving))

    @contained("observe.ranks")
    def _marks_of(self, module: Any) -> Marks:
        counts = self._passes.setdefault(module.process_group.group_name, [0, 0])
        self._models = {key: known for key, known in self._models.items() if known.model() is not None}
        marks = self._models[id(module)] = Marks(module, counts)
        return marks

    def _mark(self, text: bytes, counts: list[int], which: int) -> None:
        """Note a forward or a backward. No tensor is read, so `contained` need hide nothing: a mark is made often."""
        ring = self._ring
        if ring is None or self.paused:
            return
        try:
            counts[which] += 1
            ring.write(text, counts[which], self._sites.number(text, ring))
        except Exception as error:
            self._ring = None
            report_fault("observe.ranks", error)

    def _note(self, op: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ring = self._ring or self._open()
        if ring is None or self.paused:
            return
        name = group.group_name if group is not None else "0"
        sent = args[1] if op in SENT_SECOND and len(args) > 1 else args[0] if args else None
        tensors = (sent,) if isinstance(sent, Tensor) else sent
        peer, tag = None, 0
        if op in _ROOTED and args:
            peer = getattr(args[-1], "rootRank", None)
        elif op in _TO_ONE and len(args) > 1:
            peer, tag = args[1], args[2] if len(args) > 2 else 0
        key: Any
        try:
            if op in ("all_to_all", WRAPPED):
                key = None  # sizes differ from call to call, buffers from model to model
            elif tensors is not None and len(tensors) == 1:  # nearly always
                key = (op, name, peer, tag, tensors[0].shape, tensors[0].dtype)
            else:
                key = (op, name, peer, tag, *[(each.shape, each.dtype) for each in tensors or ()])
            text = self._texts.get(key) if key is not None else None
        except (AttributeError, TypeError):  # no list of tensors: the options of `barrier`, the ranks of a new group
            key, tensors, text = None, (), None
        if text is None:
            size = group.size() if group is not None else 0
            text = described(op, name, *contents(op, args, kwargs, tensors, size), peer, tag)
            if self.facts is not None and is_into_one(op, args):
                self.facts.seen_at("into_one", sys._getframe(1))
            if len(self._texts) >= _MAX_KNOWN:
                self._texts.clear()
            if key is not None:
                self._texts[key] = text
        count = self._counts[name] = self._counts.get(name, 0) + 1
        thread = self._threads.setdefault(get_ident(), len(self._threads))
        ring.write(text, count, self._sites.number(text, ring), thread)
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            self._note_handled(error)

    def _note_handled(self, error: Exception) -> None:
        """Note an exception that is handled while a collective is called: the process may wait or die in this call."""
        known, number = self._handled
        self._handled = id(error), number + 1 if known == id(error) else 1
        if self._handled[1] > _MAX_HANDLED or self._path is None:
            return
        write_atomically(self._path / HANDLED, msgspec.json.encode(_told(error)))

    @contained("observe.ranks")
    def _note_wrapped(self, group: Any, tensors: Any, frame: FrameType) -> None:
        module: Any = frame.f_locals.get("module")
        is_sent = frame.f_locals.get("init_sync", True) and isinstance(module, torch.nn.Module)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [each for name, each in module.named_buffers() if name not in ignored] if is_sent else []
        self._note(WRAPPED, group, ([*{each.dtype: each for each in tensors}.values()],), {"buffers": buffers})

    def _open(self, rank: int | None = None, size: int = 0) -> Ring | None:
        if self._shut:
            return None
        self._shut = True  # one attempt
        self._threads = {get_ident(): 0}
        if rank is None:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        folder = self._folder(rank, size)
        self._path = folder
        if folder is not None:
            self._ring = Ring(folder / FILE, rank, size)
            with contextlib.suppress(AttributeError, OSError):  # no memory files, or no memory: the file does as well
                self._move(self._ring, folder.name)
        return self._ring

    def _move(self, ring: Ring, name: str) -> None:
        """Have the ring written into memory, which takes a tenth of the time, if a parent will hold the memory."""
        token = int.from_bytes(os.urandom(8), "little") or 1
        descriptor = memory_file(memory_name(token), bytes(SIZE))
        memory = mapped(descriptor, SIZE)
        ring.move(memory, descriptor, token)
        if not self._hand_over(descriptor, f"{name}/{FILE}"):
            ring.stay()


def _told(error: Exception) -> HandledException:
    """An exception that is being handled, with the lines of its traceback."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append(StackFrame(file=code.co_filename, line=tb.tb_lineno or 0, function=code.co_name))
        tb = tb.tb_next
    return HandledException(
        kind=type(error).__name__, text=str(error)[:_MAX_TEXT], frames=tuple(frames[::-1]), time=time()
    )
