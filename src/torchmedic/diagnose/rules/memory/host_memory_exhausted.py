"""The host has no memory for what this line asks for.

What: an allocation in the host's memory (not on a GPU) was refused: by the limit of the process, or because it is
larger than what the host has.

Why: two tensors whose shapes do not match broadcast to a far larger one ([N, 1] with [N] gives [N, N]), a size was
computed wrongly, or memory had filled up step by step before: tensors collected in a list, with their whole graph.

Cure: bring the shapes together before the operation, work in parts, or keep numbers (`loss.item()`) instead of tensors.
"""

from __future__ import annotations

import ast
import math
import re

from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe.host import HostMemory, free_space, host_memory
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.holdings import Result, holdings, results_of
from torchmedic.replay.loading import loading_of

CODE, NAME = "TM401", "host-memory-exhausted"

_UNITS = {
    "B": 1,
    "bytes": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "EiB": 1 << 60,
}


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    worker = evidence.incident.worker
    text = worker.message if worker is not None else evidence.message
    if not _is_exhaustion(evidence, text):
        return None
    asked = _asked(text)
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
        message = f"there is no memory for {size(asked)}" + (f", a tensor of {list(made[0].shape)}" if made else "")
    else:
        message = "the host's memory is exhausted"
    draft = Draft(CODE, NAME, "proven", message, _cause(asked, memory))
    if worker is not None and (loading := loading_of(evidence)) is not None:
        draft.at(
            loading.at_user_frame("cause", "refused here"), loading.at_loop("surfaced", "the batch was asked for here")
        )
        draft.because(loading.process)
    else:
        label = f"{size(asked)} asked for here" if asked is not None else "refused here"
        draft.at(*evidence.at_user_line("cause", label))
    graphs = _held(draft, evidence, memory)
    if grown is not None:
        draft.help("bring both to the same shape first, for example with `.squeeze(-1)` or `.unsqueeze(-1)`")
    elif overflow is not None or (asked is not None and memory.total is not None and asked > memory.total):
        draft.help("check the sizes on this line: no host of this size can hold the result")
    elif graphs:
        draft.help(f"keep numbers in `{graphs}` (`.item()`), or detached tensors: each of them holds its whole graph")
    else:
        draft.help("work in smaller parts, or keep less from earlier steps")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _is_exhaustion(evidence: RaisedEvidence, text: str) -> bool:
    raised_by_hand = (
        bool(evidence.frames) and evidence.frames[-1].is_user and isinstance(evidence.frames[-1].statement, ast.Raise)
    )
    if "MemoryError" in evidence.kinds or "MemoryError" in getattr(evidence.incident.worker, "exception", ""):
        return not raised_by_hand
    if not (evidence.kinds & {"RuntimeError", "OSError"}):
        return False
    return (
        any(
            fragment in text
            for fragment in (
                "DefaultCPUAllocator",
                "Storage size calculation overflowed",
                "unable to allocate shared memory",
                "Cannot allocate memory",
            )
        )
        and not raised_by_hand
    )


def _asked(text: str) -> int | None:
    """The number of bytes that the refusal names."""
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        return int(found[1])
    if found := re.search(r"[Uu]nable to allocate ([\d.]+) (\w+)", text):
        return int(float(found[1]) * _UNITS.get(found[2], 0)) or None
    return None


def _about(nbytes: int, asked: int) -> bool:
    """Equal but for the rounding of an allocator and of a message."""
    return abs(nbytes - asked) <= max(64, asked // 100)


def _is_accident(result: Result) -> bool:
    """Whether two operands that look alike grew into a table of all pairs, as [N, 1] and [N] do."""
    if len(result.operands) != 2:
        return False
    one, two = result.operands
    stretched = len(one) != len(two) or 1 in one or 1 in two
    return stretched and math.prod(result.shape) >= 16 * max(math.prod(one), math.prod(two))


def _cause(asked: int | None, memory: HostMemory) -> str:
    want = f"{size(asked)} asked for" if asked is not None else "an allocation was refused"
    if memory.address_limit is not None:
        holds = f", of which {size(memory.address_space)} are in use" if memory.address_space is not None else ""
        return f"{want}; the process may have {size(memory.address_limit)} of address space (ulimit -v){holds}"
    if memory.total is not None:
        free = f", of which {size(memory.available)} are free" if memory.available is not None else ""
        return f"{want}; the host has {size(memory.total)}{free}"
    return want


def _held(draft: Draft, evidence: RaisedEvidence, memory: HostMemory) -> str:
    """Say what the process and its biggest variables hold; return the name of one that keeps graphs alive."""
    if memory.resident is not None:
        who = "the main process" if evidence.incident.worker is not None else "the process"
        draft.because(f"{who} holds {size(memory.resident)}")
    shared = free_space("/dev/shm") if evidence.says("shared memory") else None
    if shared is not None:
        draft.because(f"/dev/shm has {size(shared[1])}, of which {size(shared[0])} are free now")
    if memory.cgroup_limit is not None:
        draft.because(f"its cgroup may hold {size(memory.cgroup_limit)}")
    keeper = ""
    for held in holdings(evidence.frames)[:3]:
        if held.nbytes < (memory.resident or 0) // 10 and held.tensors <= 100:
            continue
        graph = f", {held.with_graph} of them with their graph" if held.with_graph and held.tensors > 1 else ""
        count = f" in {held.tensors} tensors{graph}" if held.tensors > 1 else ""
        draft.because(f"`{held.name}` holds {size(held.nbytes)}{count}")
        keeper = keeper or (held.name if held.with_graph > 2 else "")
    return keeper


RULE = Rule(CODE, NAME, check)
