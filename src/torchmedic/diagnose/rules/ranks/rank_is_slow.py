"""One rank is slower than the others, which wait for it in every step.

What: the ranks meet in the collectives of every step. One rank comes last nearly every time, and the others spend a
large part of the step waiting for it. The job is not hung: it moves at the speed of this rank.

Why: a rank with more or longer samples, with slower storage or a loader of its own, with extra work (logging, saving,
evaluating), on a busy or throttled processor or GPU.

Cure: look at what this rank does between the two lines. Give all ranks the same amount of work, and move extra work out
of the step.
"""

from __future__ import annotations

from torchmedic.detect.ranks.stragglers import find_straggler, slow_phase
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration
from torchmedic.records import Phase
from torchmedic.records.rank_facts import JobFacts

_PHASES: dict[Phase, str] = {
    "data": "waiting for data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the update of the weights",
}


@rule("TM716", "rank-is-slow")
def check(job: JobFacts) -> Draft | None:
    if len({each.host for each in job.ranks}) > 1:
        return None
    found = find_straggler(job.logs, ended=job.ended)
    if found is None:
        return None
    draft = check.draft(
        job,
        "proven",
        f"rank {found.rank} is slower than the others, which wait for it in every step",
        f"rank {found.rank} arrived last at {found.late} of {found.meetings} collectives; the others waited for it for "
        f"{duration(found.wait)} of a step of {duration(found.step)}",
    ).about(found.rank)
    slow = slow_phase(job.moments, found)
    if slow is not None:
        moment, seconds = slow
        draft.at(line_location("cause", moment.file, moment.line, f"rank {found.rank} spends {duration(seconds)} here"))
        draft.because(
            f"rank {found.rank} spends {duration(seconds)} of a step {_PHASES[moment.phase]}; the others spend less"
        )
    draft.at(at_call(found.call, "surfaced" if slow else "cause", f"rank {found.rank} comes late to this call"))
    draft.at(at_call(found.before, "origin", "it is late since this call, which all ranks leave together"))
    draft.because(f"compared: when each rank arrives at {words(found.call)}, the first collective of a step")
    draft.because(f"in total the others waited {duration(found.wait * found.meetings)}")
    where = "there" if slow is not None else "between these lines"
    draft.help(f"look at what rank {found.rank} does {where}: its data, its extra work, its processor")
    return draft.rated("warning")
