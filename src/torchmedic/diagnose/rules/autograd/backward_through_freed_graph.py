"""Backward went a second time through a graph whose buffers the first time had freed.

What: `backward()` frees what the forward pass saved. A later backward that reaches the same part of the graph finds
nothing there.

Why: a tensor of an earlier step is used again with its history (a hidden state, a running loss, something computed once
before the loop), or two losses of one step share a part of the graph and each gets its own `backward()`.

Cure: detach what is carried from step to step, compute inside the loop what depends on the weights, and add up losses
that share a graph before one `backward()`. `retain_graph=True` is seldom the answer: it keeps the old steps alive too.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.graph_edits import detached_use, retained
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe.notes import released
from torchmedic.records import Diagnosis
from torchmedic.replay.backward import BackwardFailure
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame, node_location
from torchmedic.replay.old_graph import Carrier, binding_of, carriers, nodes_behind, older_than
from torchmedic.replay.trial import attempt, treatment

CODE, NAME = "TM104", "backward-through-freed-graph"

_MESSAGE = "backward reached a part of the graph that was already freed"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("backward through the graph a second time"):
        return None
    failure = BackwardFailure(evidence)
    old = older_than(nodes_behind(failure.roots), evidence.incident.agent.notes.sequence_number)
    draft = _carried(failure, old) if old else _same_step(failure)
    if draft is None:
        draft = Draft(CODE, NAME, "likely", _MESSAGE, "torch found that the saved values of a node are gone")
        if failure.caller is not None:
            draft.at(failure.caller.location("cause", "the second backward"))
        draft.help("detach what is carried over from earlier steps, or add the losses up before one backward")
    elif failure.caller is not None:
        draft.at(failure.caller.location("surfaced", "the second time, here"))
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _carried(failure: BackwardFailure, old: set[object]) -> Draft | None:
    """A variable brings the graph of an earlier step in."""
    found = _carrier(failure, old)
    if found is None:
        return None
    carrier, frame, binding = found
    draft = Draft(
        CODE,
        NAME,
        "proven",
        _MESSAGE,
        f"`{carrier.name}` was computed before this step and still carries its history: "
        f"{len(old)} nodes of the graph are older than the step",
    )
    if binding is None:
        draft.at(frame.location("cause", f"`{carrier.name}` still carries the graph of an earlier step"))
        draft.help(f"detach `{carrier.name}` before it is used again, or compute it in every step")
        return draft
    draft.at(node_location("cause", frame.file, binding, f"`{carrier.name}` keeps its graph from here on"))
    step = failure.step
    if (
        step is not None
        and frame.live is step.frame
        and step.segment.lines[0] <= binding.lineno <= step.segment.lines[1]
    ):
        for title, edit in detached_use(frame.file, carrier.name, step.segment.lines):
            tried = treatment(title, attempt(step, edit), safety="changes-training")
            if tried is not None:
                return draft.treat(tried)
        return draft.help(f"detach `{carrier.name}` before the next step takes it over")
    # Made once, outside of the step: to detach it would only hide that its weights are never trained.
    return draft.help(f"compute `{carrier.name}` in every step, or under `torch.no_grad()` if it shall not be trained")


def _carrier(failure: BackwardFailure, old: set[object]) -> tuple[Carrier, Frame, ast.stmt | None] | None:
    """The variable, the frame that it lives in and the statement that made it; a frame that made it is preferred."""
    notes = failure.evidence.incident.agent.notes
    kept = {name: released(value) for name, value in notes.carried.items()}
    first: tuple[Carrier, Frame, ast.stmt | None] | None = None
    for frame in reversed(failure.evidence.frames):
        if not frame.is_user:
            continue
        start = kept if id(frame.live) == notes.carried_frame else {}
        for carrier in [*carriers(start, old), *carriers(dict(frame.variables), old)]:
            binding = binding_of(frame, carrier.name)
            if binding is not None:
                return carrier, frame, binding
            first = first or (carrier, frame, None)
    return first


def _same_step(failure: BackwardFailure) -> Draft | None:
    """Two backward calls of one step meet in the same part of the graph."""
    step = failure.step
    if step is None:
        return None
    played = step.runner.play()
    calls = [call for call in played.backward_calls if call.spot is not None]
    if len(calls) < 2:
        return None
    last = calls[-1]
    mine = nodes_behind(last.roots)
    for call in reversed(calls[:-1]):
        shared = mine & nodes_behind(call.roots)
        if not shared:
            continue
        again = any(root.grad_fn is other.grad_fn for root in last.roots for other in call.roots)
        if again:
            why = "backward is called twice on the same loss"
            place = last.spot.location("cause", "the same loss again") if last.spot else None
        else:
            why = f"the two losses share {len(shared)} nodes of the graph, and the first backward freed them"
            place = call.spot.location("cause", "this backward frees the shared part") if call.spot else None
        draft = Draft(CODE, NAME, "proven", _MESSAGE, why)
        draft.at(place)
        if call.spot is not None:
            draft.at(call.spot.location("origin", "the first time"))
            if not again:
                for title, edit in retained(call.spot):
                    draft.treat(treatment(title, attempt(step, edit, keep_graphs=False)))
        draft.help("add the losses up and call backward once" if not again else "call backward once per loss")
        return draft
    return None


RULE = Rule(CODE, NAME, check)
