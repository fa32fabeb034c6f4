"""A container of the loop collects tensors until memory is full.

What: a list, dict or buffer that the loop fills holds a large part of the memory. The tensors in it have no graph any
more; there are simply too many of them.

Why: outputs, features or batches are collected on the device for a metric at the end; a replay buffer has no bound.

Cure: move what is collected to the host (`.cpu()`), reduce it first (`.argmax()`, `.mean()`), or bound the container.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.describe import count
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import kind_of, noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.memory.attempts import callers_of
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.memory.fillers import Filler, fillers_of, traffic_of
from torchmedic.replay.memory.holders import Holder
from torchmedic.replay.memory.run_again import is_run_again

CODE, NAME = "TM412", "collected-tensors"

_SHARE = 0.25  # of all tensors
_SEVERAL = 4
_NEARLY_ALL = 0.7


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    for holder, nbytes, number in _collected(autopsy):
        if nbytes < _SHARE * autopsy.book.everything or number < _SEVERAL:
            continue
        if nbytes < (autopsy.asked or 0):
            continue
        # It must be the loop that fills it: a data set in memory is filled before.
        filler = next((each for each in fillers_of(holder) if each.in_loop), None)
        if filler is not None and autopsy.is_of_failing_call(holder) and not _is_of_loop(holder, filler, evidence):
            continue
        if filler is None or not is_run_again(filler, evidence.frames, autopsy.book.modules):
            continue
        draft = Draft(
            CODE,
            NAME,
            "proven",
            f"`{holder.path}` has collected {size(nbytes)} in {count(number, kind_of(autopsy, holder))}",
            _reason(holder, autopsy.asked or 0),
        )
        draft.at(filler.location("cause", f"`{holder.path}` is filled here"), *noticed(autopsy))
        shown(draft, autopsy)
        where = "move it to the host first (`.cpu()`)" if autopsy.exhaustion.on_device else "reduce it first"
        draft.help(f"{where}, keep only what is needed later, or bound the container")
        return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)
    return None


def _collected(autopsy: Autopsy) -> list[tuple[Holder, int, int]]:
    """The three that hold most; `features['a']` and `features['b']` are `features`, where neither has nearly all."""
    families: dict[tuple[str, str, str], list[tuple[Holder, int, int]]] = {}
    for each in autopsy.holders():
        holder = each[0]
        families.setdefault((holder.file, holder.function, re.sub(r"(\[[^]]*\])+$", "", holder.path)), []).append(each)
    found = []
    for (_, _, base), family in families.items():
        nbytes, number = sum(each[1] for each in family), sum(each[2] for each in family)
        whole = len(family) > 1 and family[0][1] <= _NEARLY_ALL * nbytes
        found += [(family[0][0]._replace(path=base), nbytes, number)] if whole else family
    return sorted(found, key=lambda each: -each[1])[:3]


def _is_of_loop(holder: Holder, filler: Filler, evidence: RaisedEvidence) -> bool:
    """Whether it is a variable of a function outside of the model, whose own loop fills it and is running now."""
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
    return f"the loop puts in more and takes none out; {more}"


RULE = Rule(CODE, NAME, check)
