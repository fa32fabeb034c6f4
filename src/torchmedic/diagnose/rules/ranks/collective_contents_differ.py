"""Ranks call the same collective with contents that do not fit.

What: all ranks are at the same call, but the tensors have different shapes or dtypes, or the ranks name different
source ranks or members of a new group, or a rank sends a part in `all_to_all`, or a message, that the other does not
take, or the ranks train different models of several. gloo raises an error, aborts the process or waits for ever; NCCL
mixes up memory or waits for ever.

Why: the last batch of one rank is smaller, a list has another length on each rank, one rank computes in another dtype,
the source is computed from the rank, groups are made in another order. Or a loop takes the tensors in another order on
each rank: the order of a `set` of texts differs between processes. Or one rank has no
gradient for a parameter, and leaves it out.

Cure: pad to a common size (`all_reduce` the sizes with MAX first) or drop the last batch; convert to one dtype; pass
the same source on all ranks; make all groups on all ranks, in one order.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._left_loops import PARTS_OF_MODEL
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.ranks import BACKWARD, WRAPPED, Collective, Job
from torchmedic.source.branches import Branch, Loop, branches_around, exits_before, loops_around
from torchmedic.source.line_relations import asks_for_gradient, follows_in_block


@rule("TM703", "collective-contents-differ")
def check(job: Job) -> Draft | None:
    difference = job.difference
    if difference is None or difference.call is None or difference.expected is None:
        return None
    call, expected = difference.call, difference.expected
    if difference.kind != "content" and not _is_other_source(call, expected):
        return None
    what, own, theirs = _difference(call, expected)
    if not what:
        return None
    who, others = ranks(difference.culprits), ranks(difference.others)
    draft = check.draft(
        job,
        "proven",
        f"{words(call)} was called with {what} {own} on {who} and {theirs} on {others}",
        f"all ranks must pass the same {what} to {words(call)} at {place(call)}",
    )
    if call.op == "send":
        draft.message = f"{who} sends {what} {own} to {others}, which takes {what} {theirs}"
        draft.cause = (
            f"{words(call)} and {words(expected)} must have the same size; {place(expected)} takes this message"
        )
        sends, takes = (call, f"{who} sends {own}"), (expected, f"{others} takes {theirs}")
        if what == "shape":  # what is sent was computed, and the script has chosen the size of what takes it
            draft.about(difference.others[0])
            draft.message = f"{others} takes shape {theirs} from {who}, which sends shape {own}"
            draft.cause = (
                f"{words(call)} and {words(expected)} must have the same size; {place(call)} sends this message"
            )
            sends, takes = takes, sends
        draft.at(at_call(sends[0], "cause", sends[1]), at_call(takes[0], "origin", takes[1]))
        show(draft, job, difference)
        return draft.help(_CURES["dtype" if what == "dtype" else "message"])
    if what == _PARTS:
        draft.cause = f"{who} sends {own} elements to {others}, which takes {theirs} from it"
    loop = _loop_of_others(call, expected) if what == "shape" else None
    skip = _skip(call, loop) if loop is not None else None
    lacks = what == "shape" and skip is None and bool(call.frames) and asks_for_gradient(*_line(call))
    if skip is not None:
        draft.at(line_location("cause", call.frames[0].file, skip.line, "a rank leaves out what the others exchange"))
    draft.at(at_call(call, "surfaced" if skip is not None else "cause", f"{what}: {who} {own}, {others} {theirs}"))
    draft.at(at_call(expected, "origin", f"{others}: {theirs}"))
    if loop is not None:
        draft.at(line_location("origin", call.frames[0].file, loop.line, "each turn of this loop takes one tensor"))
        draft.because("these are different tensors, and not parts of unequal length")
    show(draft, job, difference)
    if lacks:
        draft.because("the line leaves out parameters without a gradient, so the ranks may be at different parameters")
    draft.help(_CURES["skip" if skip is not None or lacks else "order" if loop is not None else what])
    if what == "shape" and loop is None and not lacks and _goes_through_many(call):
        draft.help(_CURES["many"])
    return draft


def _is_other_source(call: Collective, expected: Collective) -> bool:
    """Whether two lines that exclude each other make one call with different sources."""
    is_alike = (call.op, call.group, call.shapes, call.dtypes) == (
        expected.op,
        expected.group,
        expected.shapes,
        expected.dtypes,
    )
    if not is_alike or call.op not in ("broadcast", "scatter") or call.peer == expected.peer:
        return False
    own, theirs = next(((a, b) for a in call.frames for b in expected.frames if a.function == b.function), (None, None))
    if own is None or theirs is None or own.file != theirs.file:
        return False
    lines = sorted((own.line, theirs.line))
    return not follows_in_block(own.file, *lines)  # else one rank may come to the later line, too


def _loop_of_others(call: Collective, expected: Collective) -> Loop | None:
    """The `for` around a call, if the ranks are at different tensors: at different parameters, as these have the same
    shapes on all ranks, or at tensors of which more than one size differs.
    """
    one, other = next(
        (pair for pair in zip(call.shapes, expected.shapes, strict=False) if pair[0] != pair[1]), ((), ())
    )
    around = loops_around(call.frames[0].file, call.frames[0].line) if call.frames else []
    loop = next((each for each in around if each.header.startswith("for ")), None)
    sizes = sum(a != b for a, b in zip(one, other, strict=False))
    is_other = len(one) != len(other) or sizes > 1 or (loop is not None and PARTS_OF_MODEL.search(loop.header))
    return loop if is_other else None


def _goes_through_many(call: Collective) -> bool:
    """Whether the innermost loop around a call takes what a dict holds, or its tensors are summed one by one."""
    around = loops_around(call.frames[0].file, call.frames[0].line) if call.frames else []
    if not around or not around[0].header.startswith("for ") or " in sorted(" in around[0].header:
        return False
    return call.op == "all_reduce" or re.search(r"\.(items|keys|values)\(\)", around[0].header) is not None


def _line(call: Collective) -> tuple[str, int]:
    return call.frames[0].file, call.frames[0].line


def _skip(call: Collective, loop: Loop) -> Branch | None:
    """The `if` inside a loop over the parameters that a call depends on: `if parameter.grad is not None`.

    An `if` in front of the call with a `continue` is one, too.
    """
    if not PARTS_OF_MODEL.search(loop.header):
        return None
    place = _line(call)
    skips = [each for each in exits_before(*place) if each.exit == "continue"]
    return next((each for each in (*branches_around(*place), *skips) if each.line > loop.line), None)


_PARTS = "split sizes"
_CURES = {
    "shape": "pad the tensor to a size that all ranks agree on, or use `drop_last=True` and equal shares of the data",
    "message": "take a message into a tensor of its own size: send the size first, or use batches of one size",
    "order": "let the loop take the tensors in one order: sort them; a `set` has another order in each process",
    "many": "or let the loop go through its names in one order, `sorted(...)`: a `set`, or a dict that was filled in "
    "another order, gives each rank another tensor",
    "skip": "exchange the gradient of every parameter on all ranks, and a tensor of zeros where there is none",
    "dtype": "convert the tensor to one dtype on all ranks before the call",
    "source rank": "pass the same rank as source or destination on all ranks",
    "model size": "call the models, and their backward, in the same order on all ranks",
    _PARTS: "exchange the sizes first: `all_to_all_single` the input splits, and use the result as output splits",
    "buffers": "register the same buffers, with the same shapes, on all ranks before the model is wrapped",
    "members": "make the groups in the same order on all ranks, also on ranks that are no members",
}


def _difference(call: Collective, expected: Collective) -> tuple[str, str, str]:
    """What differs first, and the two values."""
    for one, other in zip(call.dtypes, expected.dtypes, strict=False):
        if one != other:
            return "dtype", one, other
    if call.shapes != expected.shapes and call.op == WRAPPED:
        own, theirs = (f"({number} with {size} elements)" for number, size in (call.shapes[0], expected.shapes[0]))
        return "buffers", own, theirs
    if call.shapes != expected.shapes:
        kind = {"new_group": "members", BACKWARD: "model size", "all_to_all": _PARTS}.get(call.op, "shape")
        pairs = zip(call.shapes, expected.shapes, strict=False)
        unequal = [pair for pair in pairs if pair[0] != pair[1]]
        if unequal:
            return kind, str(list(unequal[0][0])), str(list(unequal[0][1]))
        return kind, f"{len(call.shapes)} tensors", f"{len(expected.shapes)} tensors"
    if call.peer != expected.peer:
        return "source rank", str(call.peer), str(expected.peer)
    return "", "", ""
