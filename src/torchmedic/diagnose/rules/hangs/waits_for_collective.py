"""A rank waits for the other ranks.

What: the main thread is in a call that all ranks of a job must make (all_reduce, barrier, broadcast, the backward of
DistributedDataParallel, joining the job), and not all other ranks have reached it.

Why: a branch that only some ranks take (`if rank == 0:` around a save that contains a barrier), a different number of
batches per rank, an exception or a `continue` on one rank before backward, a rank that was never started or cannot be
reached, a wrong world size; a rank that polls for something that no rank can provide any more.

Cure: check the other ranks: the diagnosis shows the lines of the ranks on this host. Make every rank call the same
collectives in the same order, and agree on early exits with an all_reduce of a flag.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._collectives import JOINING, POLLS, Call, Rank, call_of, on_one_host, peer_states
from torchmedic.diagnose.words.format import duration, listed
from torchmedic.diagnose.words.stall import StallDraft, at, short, stall_rule
from torchmedic.records.inside import InsideView, JobView, PyFrame
from torchmedic.records.stall import Stall

_HELP = "every rank must make the same calls in the same order: look for a branch that only some ranks take"
_START_HELP = "start as many processes as the world size says, with the same `MASTER_ADDR` and `MASTER_PORT`"
_POLLING_LIMITS = 4  # times the limit: for so long a rank may poll for something from outside of the job
_UNSEEN_RANK_LIMITS = 10  # times the limit: for so long a rank that cannot be seen may be slow


@stall_rule("TM532", "waits-for-collective")
def check(stall: Stall) -> Draft | None:
    for pid, view in stall.inside.items():
        call = call_of(stall.process(pid), view)
        if call is not None:
            return _told(stall, view, call)
    return None


def _told(stall: Stall, view: InsideView, call: Call) -> Draft:
    ranks = peer_states(stall, view.pid)
    slow = [rank for rank in ranks if rank.state == "behind"]
    job = view.job
    world = job.world_size if job is not None else None
    missing = world - 1 - len(ranks) if world is not None else 0
    alone = _alone(stall, ranks) if missing <= 0 else None
    if alone is not None:
        return _does_not_come(stall, view, call, alone, ranks)
    if slow:
        return _slow(stall, view, call, slow, ranks)
    together = on_one_host(stall.process(view.pid))
    unseen = (
        any(rank.state == "unknown" for rank in ranks)
        or (missing > 0 and together is not True)
        or (job is None and together is False)
    )
    draft = check.draft(stall, "likely")
    draft.message = f"{_who(view)} waits in {call.words} for other ranks"
    draft.cause = _cause_of_start(stall, view, ranks) if call.words == JOINING else _cause(call, ranks, missing, world)
    draft.at(at(call.frame, "cause", f"{_who(view)} waits here, in {call.words}"))
    _describe(draft, view, ranks, missing)
    draft.help(_START_HELP if call.words == JOINING else _HELP)
    patient = unseen and stall.still < _UNSEEN_RANK_LIMITS * stall.limit
    return draft.rated("note" if patient else "error")


def _alone(stall: Stall, ranks: list[Rank]) -> Rank | None:
    """The only rank that waits for no other rank, if it stands, or polls for long: no other rank can end that."""
    others = [rank for rank in ranks if rank.state != "waits"]
    if len(others) != 1 or others[0].frame is None:
        return None
    polls = others[0].how == POLLS and stall.still > _POLLING_LIMITS * stall.limit
    return others[0] if others[0].state == "stands" or polls else None


def _does_not_come(stall: Stall, view: InsideView, call: Call, alone: Rank, ranks: list[Rank]) -> Draft:
    draft = check.draft(stall, "likely")
    draft.about(alone.number)
    draft.message = f"{_who(view)} waits in {call.words} for {alone.name}, which does not come"
    draft.cause = f"the other ranks wait for {alone.name}, which {alone.how}"
    draft.at(at(alone.frame, "cause", f"{alone.name} is here"), at(call.frame, "surfaced", f"{_who(view)} waits here"))
    _describe(draft, view, ranks, 0)
    return draft.help(
        "find out what this rank waits for: no other rank can provide it, as all of them wait for this one"
    )


def _slow(stall: Stall, view: InsideView, call: Call, slow: list[Rank], ranks: list[Rank]) -> Draft:
    first = slow[0]
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: {_who(view)} waits in {call.words} for {first.name}, which is at work"
    draft.cause = f"{first.name} {first.how}"
    draft.at(at(first.frame, "cause", f"{first.name} is at work here"))
    draft.at(at(call.frame, "surfaced" if first.frame is not None else "cause", f"{_who(view)} waits here"))
    _describe(draft, view, ranks, 0)
    draft.help(f"wait; it has taken {duration(stall.still)} so far")
    return draft.rated("note")


def _cause_of_start(stall: Stall, view: InsideView, ranks: list[Rank]) -> str:
    """Why a job does not begin: ranks that have not come, or that join with another backend."""
    come = {each.rank: each for each in _joining(stall, view)}
    backends = {each.backend for each in come.values()}
    if len(backends) > 1:
        told = [f"rank {number} with {come[number].backend or 'the default'}" for number in sorted(come)]
        return f"the ranks join with different backends: {listed(told, 8)}"
    if view.joining is not None and _is_together(stall, view):
        world_size = view.joining.world_size
        missing = [str(number) for number in range(world_size) if number not in come]
        if missing:
            verb = "has" if len(missing) == 1 else "have"
            return f"{len(missing)} of {world_size} ranks {verb} not come: {listed(missing, 8)}"
    process = stall.process(view.pid)
    world = process.environment.get("WORLD_SIZE", "") if process is not None else ""
    here = 1 + sum(rank.state == "waits" for rank in ranks)
    return f"not all ranks have joined the job: {here} {'waits' if here == 1 else 'wait'} here" + (
        f", and WORLD_SIZE is {world}" if world else ""
    )


def _joining(stall: Stall, view: InsideView) -> list[JobView]:
    """The ranks that are seen to wait for the beginning of the job, this one first."""
    others = (*(peer.inside for peer in stall.peers), *stall.inside.values())
    views = [view, *(each for each in others if each is not None and each.pid != view.pid)]
    return [each.joining for each in views if each.joining is not None]


def _is_together(stall: Stall, view: InsideView) -> bool:
    """Whether all ranks of the job must be on this host."""
    return on_one_host(stall.process(view.pid)) is not False


def _cause(call: Call, ranks: list[Rank], missing: int, world: int | None) -> str:
    ahead = [rank for rank in ranks if rank.state == "ahead"]
    if ahead:
        return f"{ahead[0].name} has continued without this call"
    if ranks and all(rank.state == "waits" for rank in ranks) and missing <= 0:
        same = all(
            rank.frame is not None and call.frame is not None and _same(rank.frame, call.frame) for rank in ranks
        )
        return (
            "all ranks wait in the same call, which does not end" if same else "all ranks wait, but in different calls"
        )
    if world is None:
        return "not all ranks have joined the job"
    if missing > 0:
        return f"{missing} of {world} ranks are not on this host, or have ended"
    return "the other ranks do not reach this call"


def _describe(draft: StallDraft, view: InsideView, ranks: list[Rank], missing: int) -> None:
    if view.job is not None:
        draft.because(f"backend {view.job.backend}, rank {view.job.rank} of {view.job.world_size}")
    for rank in ranks:
        if rank.state in ("ahead", "waits"):
            draft.at(at(rank.frame, "origin", f"{rank.name} is here"))
    told = [f"{rank.name}{f' at {short(rank.frame)}' if rank.frame is not None else ''} {rank.how}" for rank in ranks]
    draft.because(listed(told, 8) if told else "")
    draft.because(f"{missing} ranks cannot be seen from here" if missing > 0 else "")


def _same(one: PyFrame, other: PyFrame) -> bool:
    return (one.file, one.line) == (other.file, other.line)


def _who(view: InsideView) -> str:
    job = view.job or view.joining
    return f"rank {job.rank}" if job is not None else "this process"
