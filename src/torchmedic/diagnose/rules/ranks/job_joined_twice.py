"""A process joins its job a second time.

What: `init_process_group` makes the default group of the process. It may be called once, and again only after
`destroy_process_group`.

Why: a function that sets up the job is called for each model, each stage or each fold; or a library (Lightning,
accelerate, a Trainer) has joined the job before the script does.

Cure: call it once, at the start of the script; guard it by `if not dist.is_initialized():`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees

_JOIN = "init_process_group"


@rule("TM730", "job-joined-twice")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside(_JOIN)
    if frame is None or evidence.user_frame is None or not evidence.says("process group twice"):
        return None
    here = evidence.user_frame
    others = [
        (file, call)
        for file, tree in user_trees()
        for call in calls_in(tree, _JOIN)
        if (file, call.lineno) != (here.file, here.line)
    ]
    draft = check.draft(evidence, "proven")
    draft.message = f"`{_JOIN}` is called a second time in this process"
    draft.cause = "the default group of a process can be made once, and it is there already"
    draft.at(*evidence.at_user_line("cause", "the second call"))
    if len(others) == 1:
        draft.at(node_location("origin", *others[0], "another call is here"))
    elif not others:
        draft.because("the script has no other such call: this line has run before, or a library joined the job")
    draft.help(f"call `{_JOIN}` once, at the start, or only `if not dist.is_initialized()`")
    return draft
