"""A limit of the process itself (`ulimit -v`, `ulimit -d`) refused the memory.

What: the kernel counts all mapped memory, or all writable memory, of a process against RLIMIT_AS or RLIMIT_DATA, and
this allocation would have exceeded the limit. The host itself may have enough memory.

Why: a shell, a cluster scheduler or the script has set the limit. The limit counts reserved memory, not used memory:
libraries, thread stacks and CUDA reserve much more address space than they ever use.

Cure: raise or remove the limit (`ulimit -v unlimited`, `h_vmem` of the job, the `setrlimit` call), and limit the memory
that is really used, with the memory setting of the job or its cgroup. If the limit is intended, process the data in
smaller parts.
"""

from __future__ import annotations

from multiprocessing import parent_process
from typing import TYPE_CHECKING

from torchmedic.diagnose.rule import Draft, RuleAnswer, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import size
from torchmedic.observe.memory.headroom import is_lifted
from torchmedic.observe.memory.last_numbers import NoRoom
from torchmedic.observe.memory.limits import Bound, Setter, refusing, setter_of
from torchmedic.records import Role

if TYPE_CHECKING:
    from torchmedic.evidence.exception import RaisedEvidence
    from torchmedic.evidence.memory.autopsy import Autopsy

_MIN_RESIDENT_SHARE = 0.5  # share of what is mapped: where less is in memory, the limit counts mostly what is not used


@rule("TM414", "address-space-limit")
def check(evidence: RaisedEvidence | NoRoom) -> Draft | RuleAnswer | None:
    if isinstance(evidence, NoRoom):
        return _from_outside(evidence)
    return _inside(evidence)


def _inside(evidence: RaisedEvidence) -> Draft | RuleAnswer | None:
    from torchmedic.diagnose.cures.memory import add_cures
    from torchmedic.diagnose.rules.memory._host_refusal import refusal_of_host
    from torchmedic.source.lookup.loader_lines import limit_call

    refusal = refusal_of_host(evidence)
    if refusal is None or (bound := refusal.bound) is None:
        return None
    message = refusal.what or "there is no memory"
    draft = check.draft(evidence, "proven" if bound.certain else "likely")
    draft.message = f"{message}: the process may have {size(bound.limit)} of {bound.of}"
    draft.cause = _cause(bound, refusal.asked)
    refusal.place(draft)
    who = setter_of(bound.name, bound.limit)
    own = who is None or who.own or parent_process() is not None  # what a worker inherits, the script may have set
    line = limit_call(bound.name, "origin", "the limit is set here") if own else None
    draft.at(line)
    memory = refusal.memory
    draft.because(_resident(bound, memory.resident), "" if line is not None else _origin(bound, who))
    if memory.available is not None:
        draft.because(f"the host itself has {size(memory.available)} free")
    graphs = refusal.hold(draft)
    if refusal.is_unseen and not is_lifted(bound.name):
        draft.because("too little memory was left for a closer examination: the hard limit equals the soft limit")
    _advise(draft, bound, line is not None)
    if graphs:
        return draft.help(graphs)
    cures = add_cures(draft, evidence.autopsy)
    if not cures.is_help:
        draft.help(_less(evidence.autopsy))
    return RuleAnswer(draft.done(), cures.plan)


def _less(autopsy: Autopsy | None) -> str:
    """Further advice. To keep less does not help if more is asked for than all that is kept."""
    if autopsy is not None and (autopsy.asked or 0) > autopsy.book.everything:
        return "work in smaller parts: what is asked for is larger than all tensors together"
    return "work in smaller parts, or keep less from earlier steps"


def _from_outside(left: NoRoom) -> Draft | None:
    """The facts from outside of a process that had no memory left for an examination."""
    bound = refusing(left.memory, left.asked)
    if bound is None:
        return None
    want = f"there is no memory for {size(left.asked)}" if left.asked is not None else "there is no memory"
    draft = check.draft(left, "proven" if bound.certain else "likely")
    draft.message = f"{want}: the process may have {size(bound.limit)} of {bound.of}"
    draft.cause = _cause(bound, left.asked)
    most = (left.memory.resident or 0) // 4
    holder = next((each for each in left.holders if each.file and each.nbytes > most), None)
    if holder is not None:
        label = f"`{holder.name}` is filled here, and held {size(holder.nbytes)} shortly before"
        draft.at(line_location("cause", holder.file, holder.line, label))
    if left.at is not None:
        role: Role = "surfaced" if holder is not None else "cause"
        draft.at(line_location(role, left.at.file, left.at.line, "refused here"))
    draft.because(_resident(bound, left.memory.resident), _origin(bound, left.setter))
    why = "" if left.lifted else ": the hard limit is as low as the soft one"
    draft.because(f"there was no room left to look closer{why}")
    draft.because(*(f"`{each.name}` held {size(each.nbytes)} when it was last looked at" for each in left.holders[:3]))
    _advise(draft, bound, False)
    if not left.lifted:
        draft.help("raise the hard limit (`ulimit -Hv`) above the soft one: then more can be told")
    return draft


def _cause(bound: Bound, asked: int | None) -> str:
    want = f"{size(asked)} asked for" if asked is not None else "an allocation was refused"
    return f"{want}, with {size(bound.taken)} of {size(bound.limit)} taken ({bound.name}, `{bound.option}`)"


def _resident(bound: Bound, resident: int | None) -> str:
    if resident is None or bound.name != "RLIMIT_AS":
        return ""
    share = 100 * resident / max(1, bound.taken)
    note = ": the limit counts mostly what is mapped and not used" if share < 100 * _MIN_RESIDENT_SHARE else ""
    return f"{size(resident)} of what counts are in memory at all ({share:.0f} %){note}"


def _origin(bound: Bound, who: Setter | None) -> str:
    if who is None:
        return ""
    if who.own:
        return f"{bound.name} was set by the process itself or by what started it for this run"
    return f"the limit is inherited: `{who.name}` (process {who.pid}), which started this, has it too"


def _advise(draft: Draft, bound: Bound, own: bool) -> None:
    if own:
        draft.help(f"raise {bound.name}, or remove the line that sets it")
    else:
        draft.help(f"raise the limit: `{bound.option} unlimited`, or the memory that the job asks for (`h_vmem`)")
