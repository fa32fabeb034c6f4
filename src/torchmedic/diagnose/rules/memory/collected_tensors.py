"""A container that the loop fills collects tensors until memory is full.

What: a list, dict or buffer that the loop fills holds a large part of the memory. The tensors in it have no graph, or
one that keeps less than they take themselves; there are just too many of them. Or one tensor grows because the loop
appends to it (`torch.cat`). On the host the container may hold arrays or plain Python objects: rows as dicts, lists of
tokens, texts.

Why: outputs, features or batches are collected on the device for a metric at the end; a replay buffer has no limit; a
dataset keeps everything that it has read, once in every DataLoader worker.

Cure: move the collected tensors to the host (`.cpu()`), reduce them first (`.argmax()`, `.mean()`), or limit the
container. Keep numbers and texts in arrays or in a memory-mapped file: Python objects take several times as much
memory.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import was_warned
from torchmedic.diagnose.rules.memory._table import noticed, shown
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.attempts import callers_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.grown_tensors import JOINS, Grown, grown_tensors
from torchmedic.evidence.memory.source.fillers import Filler, fillers_of, is_looped, traffic_of
from torchmedic.evidence.memory.source.run_again import is_run_again
from torchmedic.source.syntax import callee

_MIN_SHARE = 0.25  # share of all tensors
_MIN_ITEMS = 4
_MAX_SHARE_OF_ONE = 0.7
_MAX_COPIES = 4  # copies of the tensor that grows, in what is asked for


class Collection(NamedTuple):
    """A container that a loop fills."""

    holder: Holder
    nbytes: int
    number: int
    filler: Filler


@rule("TM412", "collected-tensors")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None:
        return None
    if (collected := _filled_by_loop(autopsy)) is not None:
        return _of_container(evidence, autopsy, collected)
    if (grown := _grown(autopsy)) is not None:
        return _of_tensor(evidence, autopsy, grown)
    return None


def is_collecting(autopsy: Autopsy) -> bool:
    """Whether a loop fills the memory with what it collects."""
    return _filled_by_loop(autopsy) is not None or _grown(autopsy) is not None


def _filled_by_loop(autopsy: Autopsy) -> Collection | None:
    """The container that is to blame: a loop must fill it. A data set in memory is filled before the loop."""
    known = autopsy.book.everything + autopsy.book.plain_objects
    for holder, nbytes, number in _biggest_holders(autopsy):
        if nbytes < _MIN_SHARE * known or number < _MIN_ITEMS or nbytes < (autopsy.asked or 0):
            continue
        looped = (each for each in fillers_of(holder) if each.in_loop)
        filler = next((each for each in looped if _is_filled(holder, each, autopsy)), None)
        if filler is not None:
            return Collection(holder, nbytes, number, filler)
    return None


def _grown(autopsy: Autopsy) -> Grown | None:
    """No container, but one tensor that the loop joins more to."""
    for found in grown_tensors(autopsy, _MIN_SHARE * autopsy.book.everything):
        # Each time a larger copy is made, so that what is asked for is that copy, or what is computed from all of it.
        is_large = found.nbytes >= (autopsy.asked or 0) // _MAX_COPIES
        if is_large and is_run_again(found.at, autopsy.evidence.frames, autopsy.book.modules):
            return found
    return None


def _of_container(evidence: RaisedEvidence, autopsy: Autopsy, found: Collection) -> Draft:
    name, kind = found.holder.path, autopsy.book.kind_of(found.holder)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` has collected {size(found.nbytes)} in {count(found.number, kind)}"
    draft.cause = _reason(found.holder, autopsy.asked or 0)
    draft.at(found.filler.location("cause", f"`{name}` is filled here"), *noticed(autopsy))
    if any(held.holder.path == name for held in autopsy.retained):
        draft.because("the tensors have graphs, but these keep little: `.detach()` alone would not free the memory")
    shown(draft, autopsy)
    where = "move it to the host first (`.cpu()`)" if autopsy.exhaustion.on_device else "reduce it first"
    return draft.help(f"{where}, keep only what is needed later, or bound the container")


def _of_tensor(evidence: RaisedEvidence, autopsy: Autopsy, found: Grown) -> Draft:
    name, kind = found.holder.path, autopsy.book.kind_of(found.holder)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` has grown to {size(found.nbytes)} in one {kind}"
    draft.cause = _reason(found.holder, autopsy.asked or 0)
    draft.at(found.at.location("cause", f"`{name}` is extended here"), *noticed(autopsy))
    shown(draft, autopsy)
    return draft.help("keep only the last part of it (`[-size:]`), or write into a tensor of a fixed size in turn")


def _is_filled(holder: Holder, filler: Filler, autopsy: Autopsy) -> bool:
    """Whether a loop is filling it; or has filled it, as was warned of, or as it is now joined to one tensor."""
    evidence = autopsy.evidence
    if was_warned(autopsy, filler, ("TM452",)) or _is_joined(holder, filler, evidence):
        return True
    if autopsy.is_of_failing_call(holder) and not _is_of_loop(holder, filler, evidence):
        return False
    return is_run_again(filler, evidence.frames, autopsy.book.modules)


def _is_joined(holder: Holder, filler: Filler, evidence: RaisedEvidence) -> bool:
    """Whether what fails is `torch.cat(preds)`, after a loop of the same function."""
    frame = evidence.user_frame
    call = frame.node if frame is not None else None
    if frame is None or frame.live.f_code is not holder.scope or not isinstance(call, ast.Call) or not call.args:
        return False
    return callee(call) in JOINS | {"stack"} and ast.unparse(call.args[0]) == holder.path and is_looped(filler)


def _biggest_holders(autopsy: Autopsy) -> list[tuple[Holder, int, int]]:
    """The three that hold most; `features['a']` and `features['b']` are `features`, where neither has nearly all."""
    families: dict[tuple[str, str, str], list[tuple[Holder, int, int]]] = {}
    for each in autopsy.holders():
        holder = each[0]
        families.setdefault((holder.file, holder.function, re.sub(r"(\[[^]]*\])+$", "", holder.path)), []).append(each)
    found = []
    for (_, _, base), family in families.items():
        nbytes, number = sum(each[1] for each in family), sum(each[2] for each in family)
        whole = len(family) > 1 and family[0][1] <= _MAX_SHARE_OF_ONE * nbytes
        found += [(family[0][0]._replace(path=base), nbytes, number)] if whole else family
    return sorted(found, key=lambda each: -each[1])[:3]


def _is_of_loop(holder: Holder, filler: Filler, evidence: RaisedEvidence) -> bool:
    """Whether the holder is a variable of a function outside of the model, whose own loop fills it and runs now."""
    return any(
        frame.live.f_code is holder.scope and is_run_again(filler, [frame])
        for frame in callers_of(evidence)
        if frame.is_user and filler.file == frame.file
    )


def _reason(holder: Holder, asked: int) -> str:
    more = f"{size(asked)} more were asked for" if asked else "more was asked for"
    known = traffic_of(holder)
    if known.is_limited or isinstance(getattr(holder.owner, "maxlen", None), int):
        return f"it is filled up to a limit, and memory ends before that; {more}"
    if known.takes:
        return f"the loop puts in more, and what takes out again came too late; {more}"
    if known.puts and known.puts[0].is_guarded:
        return f"it is a cache that keeps every item that was ever requested; {more}"
    return f"the loop adds items and never removes any; {more}"
