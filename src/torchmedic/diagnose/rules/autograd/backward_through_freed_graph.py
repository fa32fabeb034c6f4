"""`backward()` reached a part of the graph that an earlier `backward()` had already freed.

What: `backward()` frees the tensors that the forward pass saved. A later backward that reaches the same part of the
graph finds them gone.

Why: a tensor of an earlier step is used again with its graph (a hidden state, a running loss, a value computed once
before the loop), or two losses of one step share a part of the graph and each gets its own `backward()`.

Cure: detach every tensor that is carried from step to step, compute everything that depends on the weights inside the
loop, and add up losses that share a graph before one `backward()`. `retain_graph=True` is seldom the right cure: it
keeps the graphs of old steps alive too.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._carried_graph import carried_in, looked_at, uses
from torchmedic.diagnose.rules.autograd._two_losses import TwoLosses, for_others, own_spot, shared_by_both
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.result import BackwardCall, ReplayResult
from torchmedic.replay.trace.older_graph import GraphHolder, Import, Imports
from torchmedic.source.objects.graph import following, is_freed, nodes_behind
from torchmedic.source.segment.cut import loops_around

_MESSAGE = "backward reached a part of the graph that was already freed"


@rule("TM104", "backward-through-freed-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("backward through the graph a second time"):
        return None
    failure = BackwardFailure(evidence)
    draft = _replayed(failure) if failure.engine is not None else None
    if draft is None:
        draft = check.draft(evidence, "likely", _MESSAGE, "torch found that the saved values of a node are gone")
        draft.mark(failure.caller, "cause", "the second backward")
        draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
        draft.help("detach what is carried over from earlier steps, or add the losses up before one backward")
    else:
        draft.mark(failure.caller, "surfaced", "the second time, here")
    return draft


def _replayed(failure: BackwardFailure) -> Draft | None:
    failure.replay()
    found = looked_at(failure)
    if found is None:
        return None
    imports, played, old, alone = found
    if not old:
        return _same_step(failure, imports, played)
    # A loop over losses computes nothing itself: the losses are those of the loop around it.
    is_loop_of_losses = all(imports.is_old(root) for root in played.backward_calls[-1].roots)
    if alone or is_loop_of_losses:
        narrow = before = failure.step
        for number, step in enumerate(itertools.islice(failure.widen(), 1, None)):
            inside = is_loop_of_losses and not number
            if not inside and before is not None and loops_around(before.frame, before.segment.lines[-1]):
                break  # a loop around the step: what is wider holds earlier steps
            before = step
            wider = looked_at(failure)
            draft = _same_step(failure, wider[0], wider[1]) if wider is not None and not wider[2] else None
            if draft is not None:
                return draft
        failure.step = narrow
    begin = functools.partial(_freed, failure)
    return carried_in(begin, failure, imports, played, old, alone=alone) or _nameless(failure, old)


def _freed(failure: BackwardFailure, history: str, found: Import) -> Draft:
    freed = sum(is_freed(node) for node in nodes_behind([found.tensor]))
    why = f"{history}, of which an earlier backward freed {count(freed, 'node')}"
    return check.draft(failure.evidence, "proven", _MESSAGE, why)


def _nameless(failure: BackwardFailure, old: list[Import]) -> Draft | None:
    """No variable is known to hold it, but the line that uses it is."""
    spots = [spot for found in old for spot in uses(found)]
    if not spots:
        return None
    draft = check.draft(
        failure.evidence, "likely", _MESSAGE, "a tensor from before this step still carries its history"
    )
    draft.at(spots[0].location("cause", "takes a graph of an earlier step in"))
    return draft.help("detach what comes from an earlier step before it is used again")


# Two backward calls of one step


def _same_step(failure: BackwardFailure, imports: Imports, played: ReplayResult) -> Draft | None:
    """Two backward calls of one step meet in the same part of the graph."""
    calls = [call for call in played.backward_calls if call.spot is not None]
    last = calls[-1] if calls else None
    if last is None or len(calls) < 2:
        return None
    mine = nodes_behind(last.roots)
    for call in reversed(calls[:-1]):
        shared = mine & nodes_behind(call.roots)
        if not shared or call.keeps_graph:
            continue
        assert call.spot is not None
        assert last.spot is not None
        if any(_unscaled(root) is _unscaled(other) for root in last.roots for other in call.roots):
            if call.stack == last.stack:
                old = _as_imports(played, last)
                begin_carried = functools.partial(_freed, failure)
                found = carried_in(begin_carried, failure, imports, played, old, repeated=True)
                return found or _nameless(failure, old)
            draft = check.draft(failure.evidence, "proven", _MESSAGE, "backward is called twice on the same loss")
            draft.at(own_spot(last, call).location("cause", "the same loss again"))
            draft.at(own_spot(call, last).location("origin", "the first time"))
            return draft.help("call backward once per loss")
        begin = functools.partial(check.draft, failure.evidence, "proven", _MESSAGE)
        losses = TwoLosses(failure, imports, played, call, shared)
        return for_others(begin, losses) or shared_by_both(begin, losses)
    return None


def _unscaled(root: Any) -> Any:
    """The node of a loss before it was multiplied or divided by numbers, as libraries do for each backward."""
    node = root.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0") and len(following(node)) == 1:
        node = following(node)[0]
    return node


def _as_imports(played: ReplayResult, call: BackwardCall) -> list[Import]:
    """The roots of a backward that a loop repeats, as what they are to that loop: computed before it."""
    assert call.spot is not None
    return [
        Import(root, (GraphHolder(name, None, False, call.spot, is_local=False, is_passing=False),))
        for root in call.roots
        for name, value in played.namespace.items()
        if value is root
    ]
