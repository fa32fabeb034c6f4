"""A process takes part in a job that it has not joined.

What: a rank learns its number from variables such as `RANK` and `LOCAL_RANK`, and joins the job by
`init_process_group`. One of these variables is not set in this process, or the job is used without the call.

Why: the script was started by `python` in place of `torchrun`, which sets the variables; `mp.spawn` sets none of them;
`srun` sets others. Or a function that asks for the rank, wraps the model or makes a sampler runs before
`init_process_group`, or after `destroy_process_group`.

Cure: start the script by `torchrun --nproc-per-node N`, or pass `rank` and `world_size` to `init_process_group`, and
call it first. A script that also runs alone has a default: `os.environ.get("LOCAL_RANK", "0")`.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees

_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OF_LAUNCHER = (*_OF_RANK, "MASTER_ADDR", "MASTER_PORT")
_EXPECTED = re.compile(r"environment variable (\w+) expected, but not set")
_NO_GROUP = "Default process group has not been initialized"
_JOIN = "init_process_group"


@rule("TM729", "job-not-joined")
def check(evidence: RaisedEvidence) -> Draft | None:
    name = _unset(evidence)
    if name is not None:
        return _without_launcher(evidence, name)
    if not evidence.says(_NO_GROUP) or not evidence.is_torchs:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = "a job of several ranks is used, which this process has not joined"
    draft.cause = f"this call needs a process group: `{_JOIN}` has not run in this process, or the group is destroyed"
    draft.at(*evidence.at_user_line("cause", "there is no process group here"))
    calls = [(file, call) for file, tree in user_trees() for call in calls_in(tree, _JOIN)]
    for file, call in calls[:1]:
        draft.at(node_location("origin", file, call, "the job would be joined here"))
    return draft.help(f"call `dist.{_JOIN}` first, or skip this call if `dist.is_initialized()` is False")


def _unset(evidence: RaisedEvidence) -> str | None:
    """The variable of a launcher that the failing statement needs and that is not set."""
    frame = evidence.user_frame
    if frame is None:
        return None
    names: list[object] = []
    if "KeyError" in evidence.kinds and evidence.frames[-1].variables.get("self") is os.environ:
        names = list(evidence.error.args[:1])
    elif "TypeError" in evidence.kinds and frame is evidence.frames[-1] and frame.statement is not None:
        read = [
            each for each in calls_in(frame.statement, "get", "getenv") if len(each.args) == 1 and not each.keywords
        ]
        names = [each.args[0].value for each in read if isinstance(each.args[0], ast.Constant)]
    elif evidence.inside("_env_rendezvous_handler") is not None:
        names = list(_EXPECTED.findall(evidence.message))
    return next((name for name in _OF_LAUNCHER if name in names and name not in os.environ), None)


def _without_launcher(evidence: RaisedEvidence, name: str) -> Draft:
    there = [each for each in _OF_LAUNCHER if each in os.environ]
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` is not set: no launcher has started this process as a rank"
    draft.cause = "none of the variables is set that `torchrun` gives to each rank"
    if there:
        draft.message = f"`{name}` is not set"
        draft.cause = f"of the variables that `torchrun` gives to each rank, only {', '.join(there)} are set"
    draft.at(*evidence.at_user_line("cause", f"`{name}` is needed here"))
    scheduled = [each for each in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if each in os.environ]
    draft.because(f"`{scheduled[0]}` is set: this process is a rank of another launcher" if scheduled else "")
    if multiprocessing.parent_process() is not None:
        if name in _OF_RANK and evidence.inside(_JOIN) is not None:
            return draft.help(
                f"pass `rank` and `world_size` to `{_JOIN}`: processes of `mp.spawn` have no such variables"
            )
        return draft.help(f'set `os.environ["{name}"]` in this process first: `mp.spawn` sets no such variable')
    draft.help("start the script by `torchrun --nproc-per-node N`, N being the number of ranks")
    return draft.help(f'or give a default, so that the script also runs alone: `os.environ.get("{name}", ...)`')
