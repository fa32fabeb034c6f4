"""What the frames of the failure tell: the call of the model, an optimizer, a node of backward, an earlier attempt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch.optim import LBFGS

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.book import Book
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.accounting.saved_by_graph import sequence_of, tensors_saved_by
from torchmedic.evidence.memory.accounting.storages import distinct
from torchmedic.observe.step.batches import Given, main_input
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.source.live_frames import Frame, frames_of
from torchmedic.source.objects.graph import is_counted, node_of, walk
from torchmedic.source.user_code import is_user_file

_LOOSE = ("saved activations", "held", "not traced")  # headings of what goes when its holder goes

_WORKER = os.path.join("torch", "utils", "data", "_utils", "worker.py")  # given a data set, for all of its batches

_HISTORY = ("old_dirs", "old_stps", "prev_flat_grad", "d")


def callers_of(evidence: RaisedEvidence) -> list[Frame]:
    """The frames up to the call of the model, without those that torch puts around it."""
    frames = evidence.frames
    inside = next((at for at, frame in enumerate(frames) if frame.module is not None), len(frames))
    callers = list(frames[:inside])
    while callers and str(callers[-1].live.f_globals.get("__name__", "")).startswith("torch."):
        callers.pop()
    return callers


def call_under_way(evidence: RaisedEvidence, grad: bool) -> Given | None:
    """The main input of the running call of the root module."""
    for frame in evidence.frames:
        if frame.function == "_wrapped_call_impl" and frame.module is not None:
            given = frame.variables.get("args", ()) or frame.variables.get("kwargs", {}).values()
            main = main_input(given)
            if main is None:
                return None
            nested = not any(main is each for each in given)
            return Given(main.shape, frame.module.training, grad, id(frame.module), nested)
    return None


def is_updating(frames: Sequence[Frame]) -> bool:
    """Whether an optimizer was updating weights, and not calling its closure."""
    for frame in reversed(frames):
        if isinstance(frame.variables.get("self"), torch.optim.Optimizer):
            return True
        if frame.is_user or frame.module is not None or frame.function in ("backward", "_engine_run_backward"):
            return False  # a closure of it, perhaps
    return False


def is_lent(holder: Holder) -> bool:
    """Whether a variable leads to the memory through an argument of its function: the argument outlives the call."""
    code = holder.scope
    base = re.split(r"[.\[]", holder.path, maxsplit=1)[0]
    if isinstance(code, CodeType) and base in code.co_freevars and is_user_file(holder.file):
        return True  # of the function around it
    is_told = is_user_file(holder.file) or holder.file.endswith(_WORKER)
    if not isinstance(code, CodeType) or not is_told or (holder.path == base and not holder.many):
        return False
    return base in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def history_of(frames: Iterable[Frame]) -> list[torch.Tensor]:
    """The history of LBFGS, which is only in variables of `step` until `step` ends."""
    owners = [(frame, frame.variables.get("self")) for frame in frames if not frame.is_user]
    kept = [frame.variables.get(name) for frame, owner in owners if isinstance(owner, LBFGS) for name in _HISTORY]
    return tensors_in([each for each in kept if each is not None])


def pinned_by_first_attempt(evidence: RaisedEvidence, book: Book) -> int:
    """Bytes that an earlier out-of-memory holds while it is handled: its frames live until the handler ends."""
    before = evidence.error.__context__
    if before is None or not is_out_of_memory(before):
        return 0
    frames = {id(frame.live) for frame in evidence.frames}
    left = [frame.live for frame in frames_of(before.__traceback__) if id(frame.live) not in frames]
    held = [tensor for frame in left for tensor in tensors_in(list(frame.f_locals.values()))]
    nodes = [node for node in walk(map(node_of, held), set()) if is_counted(node)]
    saved = [tensor for node in nodes for tensor in tensors_saved_by(node)]
    return sum(
        memory.nbytes
        for key, memory in distinct([*held, *saved]).items()
        if key in book.entries and book.entries[key][0] in _LOOSE
    )


def next_node(evidence: RaisedEvidence, book: Book) -> Any:
    """The node that backward was at when it failed, on a device whose allocator does not tell; None if unknown.

    The engine goes from the last node to the first, and each node frees what it had saved once it is through. So the
    last node that has not was next. A call that keeps its graph does not tell, nor does a graph that is gone.
    """
    call = evidence.inside("backward", "grad")
    if call is None or _keeps(call.variables):
        return None
    given = call.variables.get("tensors") or call.variables.get("outputs") or ()
    roots = [node_of(each) for each in given if hasattr(each, "grad_fn")] if isinstance(given, tuple | list) else []
    nodes = walk(roots or map(node_of, book.live), set())
    left = [node for node in nodes if is_counted(node) and tensors_saved_by(node)]
    return max(left, key=sequence_of, default=None)


def _keeps(variables: Any) -> bool:
    return bool(variables.get("retain_graph") or variables.get("create_graph"))
