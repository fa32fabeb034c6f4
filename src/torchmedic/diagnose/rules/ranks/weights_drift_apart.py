"""The ranks train copies of one model, and their weights are not the same any more.

What: after the same number of updates, a weight has different values on different ranks, although the ranks are to
train one model together. What rank 0 saves is one of several models, each trained on a part of the data.

Why: the gradients are not averaged: the `module` inside of DistributedDataParallel is called and not the wrapper, or a
loop that averages by hand leaves out a step. Or one of several models, such as a discriminator or a critic, is neither
wrapped nor averaged. Or a layer was added, or unfrozen, after the model was wrapped. Or the ranks began with different
weights, which averaging keeps apart: a model that was built without a common seed and not broadcast. Or one rank
changed its weights by itself. Or the ranks update with different learning rates: a scheduler that each rank steps with
a loss of its own. Or one rank leaves out updates, by a test of its own loss, or all updates, by `if rank == 0:`. Or
gradients go through `reduce`, which gives the sum to one rank only, or are averaged before `backward()`. Or the last
micro-batch before an update runs under `no_sync`.

Cure: call the wrapper, not its `module`. Without DistributedDataParallel, broadcast the weights of rank 0 before the
first step, and `all_reduce` every gradient before every update. Average a loss over all ranks before it goes to a
scheduler.
"""

from __future__ import annotations

import ast
import re

from torchmedic.detect.ranks.drift import Drift, find_drift
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import Role, StackFrame
from torchmedic.records.rank_facts import JobFacts
from torchmedic.source.branches import branches_around, calls_by_rank, exits_before
from torchmedic.source.imports import files_behind
from torchmedic.source.line_relations import calls_below, calls_on, lines_that_prepare, lines_that_set, trained_models
from torchmedic.source.syntax import calls_in, nodes_in, syntax_tree

_WRITES = re.compile(r"[a-z]\w*[a-z]_")  # a method that writes in place: `copy_`
_DRAWN = [f"{rule}{each}_" for rule in ("", "xavier_", "kaiming_") for each in ("normal", "uniform")]
_SETS_ALL = frozenset({"load_state_dict", "reset_parameters", "copy_", "trunc_normal_", "orthogonal_", *_DRAWN})
_CHANGES = {
    "changed": "only some ranks change weights here",
    "written": "each rank writes values of its own here",
    "rewritten": "weights are written again here, and each rank may write others",
    "start": "each rank has weights of its own from here on",
    "skipped": "each rank decides by itself here",
    "idle": "only some ranks come to the update",
    "rates": "each rank sets its own learning rate here",
    "no-exchange": "the model is not among what is prepared here",
}
_CAUSES = {
    "unused-wrapper": "DistributedDataParallel was made, but never called for training, so it averages nothing",
    "no-sync": "the last backward before an update runs under `no_sync`, so each rank updates with its own gradients",
    "idle": "every rank has a copy of the model, and averaged gradients change only the copies that are updated",
    "added": "it came into the model after DistributedDataParallel was made, which averages only what it knew then",
    "thawed": "it was frozen when DistributedDataParallel was made, which averages only what required a gradient then",
    "written": "it is frozen, so no gradient of it is exchanged, and each rank writes values of its own into it",
    "start": "the weights differed before the first update, and averaged gradients do not bring them together",
    "changed": "DistributedDataParallel made them equal at first, and gives all ranks the same gradients",
    "rewritten": "DistributedDataParallel made them equal when it was made, and they differed before the first update",
    "skipped": "they were equal at first, and one rank has left out updates that another rank made",
    "rates": "they were equal at first, all ranks got the same gradients, and the learning rates differ",
    "left-out": "its gradient is not exchanged between the ranks, and the gradients of other weights are",
    "left-out-model": "its model began equal on all ranks, and its gradients are not exchanged; those of another are",
    "one-rank": "they were equal at first, and `reduce` gives the sum of the gradients to one rank only",
    "early": "gradients are exchanged before the backward that computes them, so each rank updates with its own",
    "no-exchange": "they were equal at first, and no gradient was exchanged between the ranks",
}
_CURES = {
    "unused-wrapper": "call the DistributedDataParallel module in the training loop, and not its `module`",
    "no-sync": "run the last backward before `optimizer.step()` outside of `no_sync`: it averages the sum of all",
    "idle": "call `optimizer.step()` on all ranks",
    "added": "add the layer before the model is wrapped in DistributedDataParallel",
    "thawed": "unfreeze the layer before the model is wrapped, or wrap it anew in DistributedDataParallel afterwards",
    "written": "`all_reduce` what the new values are computed from, or broadcast the values of one rank",
    "start": "broadcast the weights of rank 0 before the first step, or build the model with one seed on all ranks",
    "changed": "let all ranks change the weights alike, outside of `optimizer.step()` too",
    "rewritten": "write or load weights before the model is wrapped: that gives all ranks those of rank 0",
    "skipped": "decide together whether to update: `all_reduce` what the decision depends on",
    "rates": "let all ranks use the same learning rate: `all_reduce` the loss that a scheduler gets",
    "left-out": "`all_reduce` the gradient of every weight, or wrap the model in DistributedDataParallel",
    "left-out-model": "wrap this model in DistributedDataParallel too, or `all_reduce` its gradients",
    "one-rank": "use `all_reduce` in place of `reduce`: every rank needs the sum",
    "early": "exchange the gradients after the last `backward()` of the step, before `optimizer.step()`",
    "no-exchange": "wrap the model in DistributedDataParallel, or let the library prepare the model too",
}
_NOT_CERTAIN = ("early", "no-exchange", "left-out", "left-out-model", "added", "written")


@rule("TM714", "weights-drift-apart")
def check(job: JobFacts) -> Draft | None:
    drift = find_drift(job)
    if drift is None:
        return None
    name = f"`{drift.name}`" if drift.name else f"a weight of shape {list(drift.shape)}"
    changing = _changing(drift)
    by_text = changing is not None and drift.why in ("changed", "rewritten")
    draft = check.draft(job, "likely" if drift.why in _NOT_CERTAIN or by_text else "proven")
    draft.message = f"{name} has different values on different ranks after {drift.updates} updates"
    if drift.why == "idle":
        idle, busy = ([rank for rank, number in drift.exchanges if bool(number) is made] for made in (False, True))
        verb = "updates its" if len(idle) == 1 else "update their"
        draft.message = f"{ranks(idle)} never {verb} weights, and {ranks(busy)} {'does' if len(busy) == 1 else 'do'}"
    draft.cause = _CAUSES[drift.why]
    line = drift.line
    scheduling = job.ranks[0].scheduling if drift.why == "rates" and drift.rates_at else None
    logged = _logged(scheduling) if scheduling is not None else None
    if logged is not None:
        draft.at(line_location("cause", *logged, "each rank logs a value of its own, which sets the learning rate"))
        draft.help("exchange the value: `self.log(..., sync_dist=True)`")
    if scheduling is not None:
        role: Role = "cause" if logged is None else "surfaced"
        draft.at(line_location(role, scheduling.file, scheduling.line, "each rank sets its own learning rate here"))
    if line is not None and changing is not None and scheduling is None:
        draft.at(line_location("cause", line.file, changing, _CHANGES[drift.why]))
    if line is not None:
        role = "cause" if changing is None and scheduling is None else "surfaced"
        draft.at(line_location(role, line.file, line.line, _label(drift)))
    for rank, number in drift.exchanges[:8] if drift.why == "skipped" else ():
        draft.because(f"{ranks([rank])}: {number} exchanges of gradients for {drift.updates} updates")
    for rank, rate in drift.rates[:8] if drift.why == "rates" else ():
        draft.because(f"{ranks([rank])}: learning rate {rate:.6g} after {drift.rates_at} updates")
    for rank, size in drift.sizes[:8]:
        draft.because(f"{ranks([rank])}: sum of absolute values {size:.6g}")
    is_set = drift.why == "rates" and job.ranks[0].scheduling is None
    draft.help("let all ranks set the same learning rate" if is_set else _CURES[drift.why])
    return draft.rated("warning")


def _changing(drift: Drift) -> int | None:
    """The first line of the only `if` that loads or writes tensors on some ranks, where no exchange was left out.

    If learning rates differ, it is the one that sets them by hand. If updates were left out, it is the `if` around the
    update, or the one that goes to the next step in front of it. If the weights differed from the start, it is the line
    of the only model. Without any exchange, it is the only line that lets a library prepare several objects.
    """
    if drift.why == "no-exchange" and drift.line is not None:
        preparing = lines_that_prepare(drift.line.file)
        return preparing[0] if len(preparing) == 1 else None
    if drift.why in ("skipped", "idle") and drift.line is not None:
        place = drift.line.file, drift.line.line
        exits = (each for each in exits_before(*place) if each.exit in ("continue", "return") and "%" not in each.test)
        return next((each.line for each in (*branches_around(*place), *exits)), None)
    if drift.why == "rates" and drift.line is not None:
        setting = lines_that_set(drift.line.file, "lr")
        if not setting and not drift.rates_at:  # they differ from the first update on
            setting = calls_by_rank(drift.line.file, lambda name: name == "load_state_dict")
        return setting[0] if len(setting) == 1 else None
    if drift.why == "start" and drift.line is not None:
        loads = calls_by_rank(drift.line.file, lambda name: name == "load_state_dict")
        if len(loads) == 1:
            return loads[0]
        models = trained_models(drift.line.file)
        return models[0] if len(models) == 1 else None
    if drift.why == "written" and drift.line is not None:
        lines = calls_on(
            drift.line.file, drift.name.rpartition(".")[2], lambda name: _WRITES.fullmatch(name) is not None
        )
        return lines[0] if len(lines) == 1 else None
    if drift.why not in ("changed", "rewritten") or drift.line is None:
        return None
    lines = calls_by_rank(
        drift.line.file, lambda name: name == "load_state_dict" or _WRITES.fullmatch(name) is not None
    )
    if drift.why == "rewritten" and not lines:
        lines = calls_below(drift.line.file, drift.line.line, _SETS_ALL.__contains__)
    blocks = {tuple(each.line for each in branches_around(drift.line.file, line)) for line in lines}
    return lines[0] if len(blocks) == 1 else None


def _logged(scheduling: StackFrame) -> tuple[str, int] | None:
    """The only line that logs, for this rank alone, the value by which a library steps a scheduler."""
    files = files_behind([scheduling.file])
    if any(call.lineno == scheduling.line for call in calls_in(syntax_tree(scheduling.file), "step")):
        return None
    items = [
        item
        for file in files
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.Dict)
        for item in zip(node.keys, node.values, strict=True)
    ]
    monitored = {_constant(value) for key, value in items if _constant(key) == "monitor"} - {None}
    found = [
        (file, call.lineno)
        for file in files
        for call in calls_in(syntax_tree(file), "log")
        if call.args and _constant(call.args[0]) in monitored
        if not any(keyword.arg == "sync_dist" for keyword in call.keywords)
    ]
    return found[0] if len(found) == 1 else None


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _label(drift: Drift) -> str:
    if drift.why == "written":
        return "frozen parameters are made equal when the model is wrapped here, and not again"
    if drift.why == "rewritten":
        return "all ranks had the same weights when the model was wrapped here"
    if drift.why == "unused-wrapper":
        if drift.is_call:
            return "the model is called here without its wrapper, which exchanges the gradients"
        return "the wrapper is made here, and never called for training"
    if drift.why == "idle":
        return "only some ranks update their weights here"
    if drift.why == "no-sync":
        return "the last backward before an update is under `no_sync`"
    if drift.why == "added":
        return "the model is wrapped here, without this weight"
    if drift.why == "thawed":
        return "the model is wrapped here, and this weight was frozen at that time"
    if drift.why == "early":
        return "the gradients of the step are not computed yet"
    if drift.why == "left-out":
        return "this exchange leaves the gradient out"
    if drift.why == "one-rank":
        return "one rank gets the sum, and the others keep something else"
    return "each rank updates its own weights here"
