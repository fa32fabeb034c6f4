"""The host has no memory for what this line asks for.

What: an allocation in the host's memory (not on a GPU) was refused: by the limit of the process, or because it is
larger than what the host has.

Why: two tensors whose shapes do not match broadcast to a far larger one ([N, 1] with [N] gives [N, N]), a size was
computed wrongly, or memory had filled up step by step before: tensors collected in a list, with their whole graph.

Cure: bring the shapes together before the operation, work in parts, or keep numbers (`loss.item()`) instead of tensors.
"""

from __future__ import annotations

import math
import re

import torch

from torchmedic.detect.exhaustion import asked_of_host
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import differentiated, most_held, noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe.host import HostMemory, free_space, host_memory
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.holdings import Result, results_of
from torchmedic.replay.loading import loading_of
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of, exhaustion_in

CODE, NAME = "TM401", "host-memory-exhausted"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    worker = evidence.incident.worker
    text = worker.message if worker is not None else evidence.message
    exhaustion = exhaustion_in(evidence)
    if exhaustion is None or exhaustion.on_device:
        return None
    if ask(evidence, registry.EXHAUSTED) is not None:
        return None  # that says more, even where it is less certain
    asked = asked_of_host(text)
    autopsy = autopsy_of(evidence)
    made = [each for each in (results_of(evidence.calls) if worker is None else []) if each.nbytes > 1 << 20]
    if asked is None and "MemoryError" in evidence.kinds and made:
        asked = made[0].nbytes
    made = [each for each in made if asked is not None and _about(each.nbytes, asked)]
    grown = next((each for each in made if _is_accident(each)), None)
    memory = host_memory()
    overflow = re.search(r"overflowed with sizes=(\[[\d, ]+\])", text)
    if grown is not None:
        one, two = (str(list(shape)) for shape in grown.operands)
        message = f"{one} and {two} broadcast to {list(grown.shape)}, which takes {size(grown.nbytes)}"
    elif "shared memory" in text:
        message = "shared memory is full" + (f": there is no room for {size(asked)}" if asked is not None else "")
    elif overflow is not None:
        message = f"a tensor of {overflow[1]} is larger than any memory"
    elif asked is not None:
        failing = autopsy.failing if autopsy is not None else None
        shape = failing.shape if failing is not None else made[0].shape if made else None
        message = f"there is no memory for {size(asked)}" + (f", a tensor of {list(shape)}" if shape else "")
    else:
        message = "the host's memory is exhausted"
    draft = Draft(CODE, NAME, "proven", message, _cause(asked, memory))
    if worker is not None and (loading := loading_of(evidence)) is not None:
        draft.at(
            loading.at_user_frame("cause", "refused here"), loading.at_loop("surfaced", "the batch was asked for here")
        )
        draft.because(loading.process)
    elif autopsy is not None and (most := most_held(autopsy, "cause")) is not None:
        draft.at(most, differentiated(autopsy), *noticed(autopsy))
    else:
        label = f"{size(asked)} asked for here" if asked is not None else "refused here"
        draft.at(*evidence.at_user_line("cause", label))
    graphs = _held(draft, evidence, memory, autopsy)
    if grown is not None:
        draft.help("compute it in blocks, or bring both to the same shape first if all pairs were not meant")
    elif overflow is not None or (asked is not None and memory.total is not None and asked > memory.total):
        draft.help("check the sizes on this line: no host of this size can hold the result")
    elif graphs:
        draft.help(f"keep numbers in `{graphs}` (`.item()`), or detached tensors: each of them holds its whole graph")
    else:
        draft.help("work in smaller parts, or keep less from earlier steps")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _about(nbytes: int, asked: int) -> bool:
    """Equal but for the rounding of an allocator and of a message."""
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


def _cause(asked: int | None, memory: HostMemory) -> str:
    want = f"{size(asked)} asked for" if asked is not None else "an allocation was refused"
    if memory.address_limit is not None:
        holds = f", of which {size(memory.address_space)} are in use" if memory.address_space is not None else ""
        return f"{want}; the process may have {size(memory.address_limit)} of address space (ulimit -v){holds}"
    if memory.total is not None:
        free = f", of which {size(memory.available)} are free" if memory.available is not None else ""
        return f"{want}; the host has {size(memory.total)}{free}"
    return want


def _held(draft: Draft, evidence: RaisedEvidence, memory: HostMemory, autopsy: Autopsy | None) -> str:
    """Say what the process and its biggest variables hold; return the name of one that keeps graphs alive."""
    shared = free_space("/dev/shm") if evidence.says("shared memory") else None
    if shared is not None:
        draft.because(f"/dev/shm has {size(shared[1])}, of which {size(shared[0])} are free now")
    if memory.cgroup_limit is not None:
        draft.because(f"its cgroup may hold {size(memory.cgroup_limit)}")
    if autopsy is None:
        if memory.resident is not None:
            who = "the main process" if evidence.incident.worker is not None else "the process"
            draft.because(f"{who} holds {size(memory.resident)}")
        return ""
    shown(draft, autopsy)
    kept = next(iter(autopsy.retained), None)
    return (
        kept.holder.path
        if kept is not None and kept.is_container and kept.nbytes > autopsy.book.everything // 10
        else ""
    )


RULE = Rule(CODE, NAME, check)
