"""Notes every collective that is called from Python, in the ring of this rank.

torch's own Flight Recorder is lost with a process that is killed, keeps no `send` and `recv` of gloo, and does not
exist for gloo before torch 2.8. What this recorder cannot see are calls that torch makes in C++ (the buckets of
DistributedDataParallel): those are read from the Flight Recorder (`flight_recorder.py`) while the process lives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchmedic.contained import contained, report_fault
from torchmedic.observe.hooks import patches
from torchmedic.observe.ranks.call_site import CallSites
from torchmedic.observe.ranks.contents import METHODS, contents
from torchmedic.observe.ranks.facts import FactsOfRank
from torchmedic.observe.ranks.ring import FILE, Ring, described
from torchmedic.observe.ranks.store_mail import StoreMail
from torchmedic.records.ranks import BACKWARD, FORWARD, WRAPPED

_MAX_KNOWN = 4096  # descriptions kept
_WRAPPING = "_verify_param_shape_across_processes"  # called by the `__init__` of DistributedDataParallel

# Methods whose first argument is what they receive; what they send is the second.
_SENT_SECOND = frozenset({"all_gather", "all_gather_single", "gather", "all_to_all", "reduce_scatter_single"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_TO_ONE = frozenset({"send", "recv"})


class Recorder:
    """One per process. `folder` is asked when this process joins a job, with its rank there and the world size."""

    def __init__(self, folder: Callable[[int, int], Path | None]) -> None:
        self._folder = folder
        self.facts: FactsOfRank | None = None
        self.mail: StoreMail | None = None
        self._ring: Ring | None = None
        self._sites = CallSites()
        self._reducing: Any = None  # the marks of a DistributedDataParallel whose backward has yet to come
        self._wrappers: WeakKeyDictionary[Any, tuple[str, bytes, bytes]] = WeakKeyDictionary()
        self._sees_backward = False
        self._texts: dict[Any, bytes] = {}
        self._counts: dict[str, int] = {}
        self._marks: dict[tuple[str, str], int] = {}  # by operation and group
        self._shut = False
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
            patches.wrap(wrapping, _WRAPPING, self._around_wrapping)
        if hasattr(wrapper, "_pre_forward"):
            patches.wrap(wrapper, "_pre_forward", self._around_forward)
        if hasattr(made, "_new_group_with_tag"):
            patches.wrap(made, "_new_group_with_tag", self._around_new_group)
        if self._sees_backward:
            self._watch_backward()

    def _watch_backward(self) -> None:
        """Only a process that has made a DistributedDataParallel pays for this."""
        patches.wrap(torch.autograd, "_engine_run_backward", self._around_backward)

    def forked(self) -> None:
        """In a forked child: the ring is the parent's."""
        self._ring = self.facts = self.mail = self._reducing = None
        self._sites.clear()
        self._counts.clear()
        self._marks.clear()
        self._shut = False

    def _around(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._note_safely

        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            note(op, group, args, kwargs)
            try:
                return original(group, *args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise

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

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of DistributedDataParallel, whose backward calls collectives: it tells of a backward left out."""
        mark, marks_of = self._mark, contained("observe.ranks")(self._marks_of)

        @functools.wraps(original)
        def _pre_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module.require_backward_grad_sync and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._reducing = marks = self._wrappers.get(module) or marks_of(module)
                if marks is not None:
                    mark(FORWARD, marks[0], marks[1])
                if self.facts is not None:
                    self.facts.forward(module)
            try:
                return original(module, *args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise

        return _pre_forward

    def _around_wrapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A DistributedDataParallel is made. A frame around all of its `__init__` would show in torch's warnings.

        Its parameters are sent in C++, and must have the same dtypes on all ranks: one parameter of each is noted.
        """
        note = contained("observe.ranks")(self._note_wrapped)

        @functools.wraps(original)
        def verify(*args: Any, **kwargs: Any) -> Any:
            note(*args[:2])
            if self.facts is not None:
                self.facts.wrapped(sys._getframe(1))
            if not self._sees_backward:
                self._sees_backward = True
                self._watch_backward()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise

        return verify

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The backward of a DistributedDataParallel: it stands for the collectives in it if the process is killed."""
        mark = self._mark

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            marks = self._reducing
            if marks is not None and kwargs.get("accumulate_grad") and not torch.compiler.is_compiling():
                self._reducing = None
                mark(BACKWARD, marks[0], marks[2])
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise

        return _engine_run_backward

    def _around_new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("use_local_synchronization"):  # else only the members of the group make this call
                self._note_safely("new_group", None, args, kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                patches.without_our_frame(error)
                raise

        return _new_group_with_tag

    def _marks_of(self, module: Any) -> tuple[str, bytes, bytes]:
        """The group of a model, and the texts of its forward and backward: the latter tells models apart by size."""
        name, size = module.process_group.group_name, sum(each.numel() for each in module.parameters())
        found = name, described(FORWARD, name, (), (), None), described(BACKWARD, name, ((size,),), (), None)
        self._wrappers[module] = found
        return found

    def _mark(self, op: str, group: str, text: bytes) -> None:
        """Note a forward or a backward. No tensor is read, so `contained` need hide nothing: a mark is made often."""
        ring = self._ring
        if ring is None:
            return
        try:
            count = self._marks[op, group] = self._marks.get((op, group), 0) + 1
            ring.write(text, count, self._sites.number(sys._getframe(1), ring))
        except Exception as error:
            self._ring = None
            report_fault("observe.ranks", error)

    def _note(self, op: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ring = self._ring
        if ring is None:
            ring = self._open()
            if ring is None:
                return
        name = group.group_name if group is not None else "0"
        sent = args[1] if op in _SENT_SECOND and len(args) > 1 else args[0] if args else None
        tensors = (sent,) if isinstance(sent, Tensor) else sent
        peer, tag = None, 0
        if op in _ROOTED and args:
            peer = getattr(args[-1], "rootRank", None)
        elif op in _TO_ONE and len(args) > 1:
            peer, tag = args[1], args[2] if len(args) > 2 else 0
        key: Any
        try:
            if op == "all_to_all":
                key = None  # sizes differ from call to call
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
            if len(self._texts) >= _MAX_KNOWN:
                self._texts.clear()
            if key is not None:
                self._texts[key] = text
        count = self._counts[name] = self._counts.get(name, 0) + 1
        ring.write(text, count, self._sites.number(sys._getframe(2), ring))

    def _note_wrapped(self, group: Any, tensors: Any) -> None:
        self._note(WRAPPED, group, ([*{each.dtype: each for each in tensors}.values()],), {})

    def _open(self, rank: int | None = None, size: int = 0) -> Ring | None:
        if self._shut:
            return None
        self._shut = True  # one attempt
        if rank is None:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        folder = self._folder(rank, size)
        self._ring = Ring(folder / FILE, rank, size) if folder is not None else None
        return self._ring
