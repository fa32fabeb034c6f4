"""One rank left the training loop while the others go on.

What: the other ranks are in one more turn of a loop that calls a collective; one rank has left this loop, by its end
or by a `break`, and never makes the call that they wait for.

Why: the ranks have a different number of batches (a dataset split by hand, a filter, `drop_last` on one side only), or
one rank decides by itself to stop (its own validation loss, its own time limit).

Cure: give all ranks the same number of batches (`DistributedSampler`, or `drop_last`), or wrap the loop in
`torch.distributed.algorithms.join.Join`. Decide to stop together: `all_reduce` a flag and let all ranks obey it.
"""

from __future__ import annotations

import ast
import re

from torchmedic.detect.ranks.culprit import deciding_branch
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._left_loops import (
    CONSTANT_NUMBER,
    have_ended,
    left_loop,
    loops_left,
    passed_instead,
)
from torchmedic.diagnose.rules.ranks._loader_lines import shared_out_at
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import BACKWARD, Collective, Difference, Job
from torchmedic.source.branches import Loop, assignments_of, flags_of_loop, process_ends
from torchmedic.source.syntax import callee, nodes_in, syntax_tree
from torchmedic.source.user_code import is_library_file


@rule("TM704", "rank-left-the-loop")
def check(job: Job) -> Draft | None:
    difference = job.difference
    if difference is None or difference.expected is None or difference.kind == "content":
        return None
    left = left_loop(job, difference)
    if left is None:
        return None
    file, loop = left
    if is_library_file(file):
        return _left_trainer(job, difference, difference.expected, file, loop)
    who, others = ranks(difference.culprits), ranks(difference.others)
    leaves = loop.exits[0] if len(loop.exits) == 1 else None
    loops = loops_left(job, difference, file, loop)
    may_end = have_ended(job, difference) and leaves is None
    ends = [line for each in loops for line in process_ends(file, each)] if may_end else []
    line, how = loop.line, "at its end"
    if leaves is not None:
        line, how = leaves.line, f"by `{leaves.exit}`, which only `{leaves.header}` decides"
    elif ends:
        line, how = ends[0], "by the end of its process, or at the end of the loop"
    chosen = difference.call is not None and deciding_branch(difference.call, difference.expected) is not None
    is_only = not [each for each in loops if each != loop and not CONSTANT_NUMBER.search(each.header)]
    instead = passed_instead(job, difference)
    is_open = leaves is not None or ends or chosen or not is_only or instead is not None
    draft = check.draft(job, "likely" if is_open else "proven")
    draft.message = f"{who} left the loop `{loop.header}` while {others} went on"
    draft.cause = f"{others} made {_what(difference.expected)} once more; {who} had left the loop {how}"
    draft.at(line_location("cause", file, line, f"{who} left the loop here"))
    _show(draft, job, difference)
    if instead is not None:
        label = f"or {others} came past this loop without a turn"
        draft.at(line_location("origin", instead[0], instead[1].line, label))
        draft.because(f"{others} may have passed `{instead[1].header}` without a turn, and gone on to the next round")
    draft.because("" if is_only else "another loop around the call with fewer turns would look the same")
    bounds = _RANGE.search(loop.header)
    if bounds is not None and leaves is None and not ends:
        return draft.help(f"give `{bounds[1]}` the same values on all ranks, for example by a broadcast from one rank")
    before = difference.before
    if leaves is not None and before is not None and before.op == "reduce" and before.root not in difference.culprits:
        draft.at(at_call(before, "origin", f"complete on rank {before.root} only"))
        draft.because(f"{words(before)} in front of this decision gives its result to rank {before.root} only")
        draft.help("use `all_reduce` in place of `reduce` where all ranks decide by the result")
    if leaves is not None or ends:
        return draft.help(_DECIDE)
    if _is_joined(file, loop):
        return draft.help(_BESIDE_JOIN)
    is_backward = difference.expected.native or difference.expected.op == BACKWARD
    return draft.help(_EQUAL_SHARES if is_backward else _EQUAL_TURNS)


def _is_joined(file: str, loop: Loop) -> bool:
    """Whether the loop is in a `with Join(...)` already."""
    around = [
        node
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.With) and node.lineno < loop.line <= (node.end_lineno or 0)
    ]
    contexts = [item.context_expr for node in around for item in node.items]
    return any(isinstance(each, ast.Call) and callee(each) in ("Join", "join") for each in contexts)


_RANGE = re.compile(r" in (t?range\((?!.*\blen\().*[a-z_].*\))$", re.IGNORECASE)
_DECIDE = "decide together: all_reduce a flag, and let all ranks leave the loop in the same turn"
_BESIDE_JOIN = (
    "leave this call out of the loop, or give every rank the same number of batches: `Join` makes up only for the "
    "calls of the models that it gets"
)
_EQUAL_TURNS = "give this loop the same number of turns on all ranks: the same number of batches or of other items"
_EQUAL_SHARES = "give every rank the same number of batches, or wrap the loop in `Join([model])`"


def _left_trainer(job: Job, difference: Difference, expected: Collective, file: str, loop: Loop) -> Draft:
    """The loop is that of a library: what ends it early is a flag that the user's code sets, or fewer batches."""
    who, others = ranks(difference.culprits), ranks(difference.others)
    logs = [state.log for state in job.ranks if state.log is not None]
    files = dict.fromkeys(frame.file for log in logs for call in log.calls for frame in call.frames)
    flags = flags_of_loop(file, loop)
    stops = [(each, *found) for each in files for found in assignments_of(each, flags)]
    called = next(iter(expected.frames), None)
    name = called.function if called is not None else ""
    trainer = next((frame.function for frame in reversed(expected.library)), name)
    stream = next((state.stream for state in map(job.of, difference.culprits) if state is not None), None)
    draft = check.draft(job, "likely")
    draft.message = f"{who} left the loop of `{trainer}` while {others} went on"
    draft.cause = (
        f"{others} made {_what(expected)} once more; {who} had left the loop `{loop.header}` of the library"
        + (f", which the flag `{stops[0][2]}` ends" if len(stops) == 1 else "")
    )
    if len(stops) == 1:
        draft.at(line_location("cause", stops[0][0], stops[0][1], f"{who} stopped the training by itself here"))
    elif stream is not None:
        at = shared_out_at(stream)
        draft.at(
            line_location(
                "cause", stream.file, at, f"{who} reads this stream, which may have ended earlier than that of {others}"
            )
        )
    elif called is not None:
        draft.at(line_location("cause", called.file, called.line, f"{who} left the loop in this call"))
    _show(draft, job, difference)
    return draft.help(_DECIDE if stops else _EQUAL_SHARES)


def _what(expected: Collective) -> str:
    return "backward" if expected.native else words(expected)


def _show(draft: Draft, job: Job, difference: Difference) -> None:
    who, others = ranks(difference.culprits), ranks(difference.others)
    expected, call, turns = difference.expected, difference.call, difference.usual
    draft.at(
        at_call(expected, "surfaced", f"{others}: {_what(expected)}, which waits for all ranks" if expected else ""),
        at_call(call, "origin", f"{who}: {words(call)}" if call is not None else ""),
    )
    show(draft, job, difference)
    draft.because(f"all ranks had made this call {turns} times before" if turns else "")
