"""An optimizer holds parameters whose result is cut off from the loss.

What: these parameters require a gradient and are used in the forward pass, but had no gradient in any step. Their
result leaves the graph before it reaches the loss: by `detach()`, `.data`, `numpy()`, `tolist()` or `argmax()`, by a
comparison, `topk()` or `sort()` of which only the positions are used, as in a mixture of experts without weights, by
`sample()` of a distribution where `rsample()` was meant, by `torch.normal`, whose gradient is 0, or by `item()` where a
new tensor is made of the number. Or their own loss is computed and not used, as one that each turn of a loop over the
tasks assigns anew. Or they run under `torch.no_grad()`, although they are new layers with random values.

Why: autograd follows only the operations that it has recorded. Parameters before a cut get no gradient; the optimizer
skips them silently, and they keep their initial values. The rest of the model may still learn, so the loss falls all
the same.

Cure: remove the cut, if these parameters should learn. If they should not, make that explicit: freeze them with
`requires_grad_(False)` and do not give them to the optimizer.
"""

from __future__ import annotations

import itertools

import torch

from torchmedic.diagnose.cures.graph_edits import call_at
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.checkup._discarded_sums import discarded_sum
from torchmedic.diagnose.rules.checkup._random_draws import blocking_draw
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_cuts import COMPARING, SELECTING, Called, Cut
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.node_births import Site
from torchmedic.observe.checkup.unreached_parameters import WRITES_OF_CONSTRUCTOR, Unreached
from torchmedic.records import Diagnosis
from torchmedic.source.lookup.term_flow import expression_at, parts_behind

_CHECKPOINTS = ("checkpoint", "checkpoint_sequential")
_HOW = {"data": "`.data`", "__float__": "`float()`", **dict.fromkeys(COMPARING, "a comparison")}


@rule("TM631", "parameters-cut-off")
def check(evidence: CheckUp) -> Diagnosis | Draft | None:
    unreached = evidence.unreached
    if unreached is None:
        drafts = (_sampled(evidence, graph) or _drawn(evidence, graph) for graph in evidence.graphs)
        return next(filter(None, drafts), None)
    written = [found for found in unreached.missing if found.is_written()]
    missing = {id(tensor): tensor for found in unreached.missing if (tensor := found.reference()) is not None}
    for found in written:
        missing.pop(id(found.reference()), None)  # a moving average, say, that needs no gradient
    cuts = [cut for cut in unreached.cuts.cuts if cut.sites and not cut.behind.isdisjoint(missing)]
    losses = [loss for loss in unreached.cuts.losses if loss.sites and not loss.behind.isdisjoint(missing)]
    losses = [loss for loss in losses if not loss.is_of_other_turn]
    if losses and not any(cut.fed or cut.entered for cut in cuts):
        # What is cut before the loss function, as for a metric, does not keep the gradient of the loss back.
        first = min(loss.sequence for loss in losses)
        cuts = [cut for cut in cuts if cut.sequence >= first]
        if not cuts:
            return _unused_loss(evidence, unreached, losses, missing)
    if not cuts:
        return _without_gradients(evidence, unreached, missing)
    cuts = [cut for cut in cuts if not cut.is_of_other_turn] or cuts
    # A choice is made of values whose graph is then cut for good; a comparison may be there for a log.
    cuts = [cut for cut in cuts if cut.name not in SELECTING] or cuts
    # What a layer is given as it is goes on to the loss. Else the last one: there may be others, for a log. `detach()`
    # is written on purpose more often than `sample()` instead of `rsample()`.
    likely = [cut for cut in cuts if cut.fed] or [cut for cut in cuts if cut.entered or cut.name == "sample"]
    cut = likely[0] if likely else cuts[-1]
    behind = frozenset[int]().union(*(each.behind for each in cuts if each.sites[0] == cut.sites[0]))
    lost = [tensor for key, tensor in missing.items() if key in behind]
    if _is_copy_of_other(evidence, lost, missing):
        return None
    others = {other.sites[0]: other for other in cuts if other.sites[0] != cut.sites[0]}
    return _diagnosis(evidence, cut, [] if cut.fed or cut.entered else list(others.values()), lost)


def _unused_loss(
    evidence: CheckUp, unreached: Unreached, losses: list[Cut], missing: dict[int, torch.Tensor]
) -> Draft | None:
    """A loss of these parameters is computed, and backward is called on another one."""
    loss = losses[0]
    lost = [tensor for key, tensor in missing.items() if any(key in each.behind for each in losses)]
    if _is_copy_of_other(evidence, lost, missing) or discarded_sum() is not None:  # of which TM637 tells
        return None
    names = [f"`{name}`" for tensor in lost if (name := evidence.name_of(tensor))]
    draft = check.draft(evidence, "likely")
    draft.message = (
        f"{count(len(lost), 'parameter')} of the optimizer cannot learn: their loss is computed and not used"
    )
    draft.cause = "the loss that these parameters have a part in is no part of the one that backward is called on"
    draft.at(evidence.at("cause", loss.sites, "this loss does not reach backward"))
    draft.because(f"no gradient in {unreached.steps} steps: {listed(names, 3)}")
    draft.help("add this loss to the one that backward is called on, as by `loss += ...` in a loop")
    return draft.about(step=unreached.steps).rated("warning")


def _sampled(evidence: CheckUp, graph: LossGraph) -> Draft | None:
    """Layers behind a sample that train on a sample without a graph, while another term trains what it is drawn from.

    Where `log_prob` of the distribution is asked, gradients go that way.
    """
    wanted = {id(tensor) for tensor in evidence.optimized} & {id(leaf) for leaf in graph.leaves()}
    drawn = [cut for cut in graph.lost_terms.cuts if cut.name == "sample"] if graph.lost_terms is not None else []
    drawn = [cut for cut in drawn if cut.sites and not cut.is_scored and cut.behind & wanted]
    births = [node.birth for node in graph.nodes if node.missing and node.birth is not None and graph.has_weight(node)]
    for cut, birth in itertools.product(drawn, births):
        if _is_computed_from(birth.sites, cut):
            draft = check.draft(evidence, "likely")
            draft.message = "the layers that compute a distribution learn nothing from what its sample is used for"
            draft.cause = "`sample()` drops the graph; only another term of the loss reaches these layers"
            draft.at(evidence.at("cause", cut.sites, "the graph ends here"))
            draft.at(evidence.at("surfaced", birth.sites, "is given the sample"))
            names = [evidence.name_of(leaf) for leaf in graph.leaves() if id(leaf) in cut.behind & wanted]
            draft.because(f"the distribution is computed with {listed([f'`{name}`' for name in names if name])}")
            draft.help("write `rsample()`", safety="changes-training")
            return draft.about(step=graph.step).rated("warning")
    return None


def _is_computed_from(sites: tuple[Site, ...], cut: Cut) -> bool:
    """Whether a call, or a call around it, is given what a cut left. A call that holds both lines says nothing."""
    wanted = [spot_of(site) for site in cut.sites if site not in sites[1:]]
    calls = [expression_at(spot_of(site)) for site in sites]
    return any(
        part.covers(spot) for call in calls if call is not None for part in parts_behind((call,)) for spot in wanted
    )


def _drawn(evidence: CheckUp, graph: LossGraph) -> Draft | None:
    found = blocking_draw(evidence, graph)
    if found is None:
        return None
    draw, names = found
    draft = check.draft(evidence, "likely")
    draft.message = "the layers that compute a distribution learn nothing from what its sample is used for"
    draft.cause = "the gradient of `torch.normal` is 0; only another term of the loss reaches these layers"
    draft.at(evidence.of_node("cause", draw, "no gradient comes through the draw"))
    draft.because(f"the distribution is computed with {listed([f'`{name}`' for name in names])}")
    draft.help(
        "write `mean + std * torch.randn_like(std)`, or `Normal(mean, std).rsample()`", safety="changes-training"
    )
    return draft.about(step=graph.step).rated("warning")


def _without_gradients(evidence: CheckUp, unreached: Unreached, missing: dict[int, torch.Tensor]) -> Draft | None:
    """Layers with the values of their constructors that run under `no_grad` only, before layers that are trained.

    A layer that was loaded or copied may be kept as it is on purpose, and a random network may give a target. A `with`
    block that was written around a layer is on purpose, too; a decorator may have been meant for another use. An
    optimizer that has nothing but such layers steps for nothing: then none of its layers is meant to be kept.
    """
    if unreached.thawed:
        return None
    found: list[tuple[torch.Tensor, Called]] = []
    for tensor in missing.values():
        calls = [(layer, unreached.cuts.call_of(layer)) for _, _, layer in evidence.owners(tensor)]
        is_new = tensor._version == WRITES_OF_CONSTRUCTOR and tensor.dim() > 1
        for layer, called in calls[:1]:
            is_fed = is_new and layer.training and (unreached.has_whole or unreached.cuts.feeds_trained(layer))
            if called is not None and not called.with_gradient and is_fed:
                found.append((tensor, called))
    if not found:
        return None
    lost = [tensor for tensor, _ in found]
    sites = found[0][1].sites
    switched = evidence.switched_off(sites)
    is_meant = switched is None or (switched.code.lstrip().startswith("with ") and not unreached.has_whole)
    checkpoint = next((site for site in sites if is_meant and call_at(spot_of(site), *_CHECKPOINTS)), None)
    if (is_meant and checkpoint is None) or _is_copy_of_other(evidence, lost, missing):
        return None
    draft = check.draft(evidence, "likely")
    if checkpoint is not None:
        return _checkpointed(evidence, draft, (checkpoint,), lost, unreached.steps)
    draft.message = f"{count(len(found), 'layer')} of the optimizer cannot learn: gradients are off where they run"
    draft.cause = "no graph is recorded of what these layers compute, and they keep their random initial values"
    draft.at(switched, evidence.at("surfaced", found[0][1].sites, "is called with gradients switched off"))
    draft.because(
        f"no gradient in {unreached.steps} steps: {listed([f'`{evidence.name_of(tensor)}`' for tensor in lost])}",
        "the optimizer has no other parameters, and steps" if unreached.has_whole else "",
        "layers that are trained are given their results" if not unreached.has_whole else "",
    )
    draft.help("run these layers with gradients if they are to learn; else leave them out of the optimizer")
    return draft.about(step=unreached.steps).rated("warning")


def _checkpointed(
    evidence: CheckUp, draft: Draft, sites: tuple[Site, ...], lost: list[torch.Tensor], steps: int
) -> Draft:
    """A reentrant checkpoint hands gradients on only if one of the tensors that it is given requires one."""
    draft.message = f"{count(len(lost), 'layer')} of the optimizer cannot learn: a reentrant checkpoint cuts them off"
    draft.cause = (
        "a reentrant checkpoint records a graph only if a tensor that it is given requires a gradient; data does not"
    )
    draft.at(evidence.at("cause", sites, "the graph ends here"))
    draft.because(f"no gradient in {steps} steps: {listed([f'`{evidence.name_of(tensor)}`' for tensor in lost])}")
    draft.help("pass `use_reentrant=False` to the checkpoint")
    return draft.about(step=steps).rated("warning")


def _is_copy_of_other(evidence: CheckUp, lost: list[torch.Tensor], missing: dict[int, torch.Tensor]) -> bool:
    """Whether a module with these parameters has a twin that is trained: a target network, copied now and then."""
    wanted, optimized = {id(tensor) for tensor in lost}, {id(tensor) for tensor in evidence.optimized}
    modules = [module for model in evidence.models for module in model.modules()]
    modules += evidence.models
    shapes = {id(module): [tuple(tensor.shape) for tensor in module.parameters()] for module in modules}
    for module in modules:
        own = [id(tensor) for tensor in module.parameters()]
        if not own or not wanted.issubset(own) or not all(key in missing for key in own):
            continue
        for other in modules:
            trained = all(id(tensor) in optimized and id(tensor) not in missing for tensor in other.parameters())
            alike = type(other) is type(module) and shapes[id(other)] == shapes[id(module)]
            if trained and alike and _is_whole(module):
                return True
    return False


def _is_whole(module: torch.nn.Module) -> bool:
    """A network, not a single layer: two layers of the same size are no twins."""
    return any(True for _ in module.children())


def _diagnosis(evidence: CheckUp, cut: Cut, others: list[Cut], lost: list[torch.Tensor]) -> Diagnosis:
    steps = evidence.unreached.steps if evidence.unreached is not None else 0
    names = [name for tensor in lost if (name := evidence.name_of(tensor))]
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    how = _HOW.get(cut.name, f"`{cut.name}()`")
    several = len(lost) > 1
    is_choice = cut.name in SELECTING
    draft = check.draft(evidence, "likely" if others or is_choice else "proven")
    draft.message = (
        f"{len(lost)} parameters of the optimizer are cut off from the loss"
        if several
        else "a parameter of the optimizer is cut off from the loss"
    )
    draft.cause = (
        f"{how} drops the graph of what {'they compute' if several else 'it computes'}; no other way leads to the loss"
    )
    draft.at(
        spot_of(cut.sites[0]).location("cause", "the graph ends here"),
        *(spot_of(other.sites[0]).location("origin", "and here") for other in others),
        evidence.at("surfaced", cut.entered, "makes a tensor of these numbers"),
    )
    draft.because(f"no gradient in {steps} steps: {shown}" if shown else f"no gradient in {steps} steps")
    cure = "write `rsample()`" if cut.name == "sample" else f"remove {how}"
    if is_choice:
        cure = "multiply the result by the values that the choice is made of, as by the weights of a softmax,"
    draft.help(f"{cure} if these parameters are to learn; else leave them out of the optimizer")
    return draft.done(step=steps, severity="warning")
