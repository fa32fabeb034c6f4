"""A policy gradient pulls the wrong way: the loss adds the entropy of the policy, or its advantage has a graph.

What: the loss multiplies log-probabilities by an advantage, and adds the entropy of the policy with a factor above 0.
Or the advantage is a difference to an estimate that is trained, and was not detached. Or the loss adds the smaller of
two products of a probability ratio with the advantage (PPO) without a minus.

Why: training makes a loss small. An entropy that is added becomes small, so the policy collapses to one action and
stops exploring; it is meant to be subtracted. Where the advantage has a graph, the policy term also changes the
estimate: the critic learns to make the advantage of likely actions large, instead of the return. Without the minus,
actions with an advantage become rare. No error is raised.

Cure: subtract the entropy (`loss = policy_loss - 0.01 * entropy`). Detach the advantage in the policy term
(`-(log_prob * advantage.detach()).mean()`). Put a minus before the smaller product: `-torch.min(first, second).mean()`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.policy_terms import (
    PolicyTerm,
    added_entropies,
    added_surrogates,
    advantages_with_graph,
)


@rule("TM648", "policy-pulled-wrong-way")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        if not graph.complete:
            continue
        added = added_entropies(graph)
        if added:
            return _entropy(evidence, graph, added[0])
        surrogates = added_surrogates(graph)
        if surrogates and not _is_made_large(evidence):
            return _surrogate(evidence, graph, surrogates[0])
        term = next(advantages_with_graph(graph), None)
        if term is not None:
            return _advantage(evidence, graph, term)
    return None


def _entropy(evidence: CheckUp, graph: LossGraph, entropy: Node) -> Draft:
    draft = check.draft(evidence, "likely")
    draft.message = "the entropy of the policy is made small: the policy stops exploring"
    draft.cause = "the loss adds the entropy with a factor above 0, and training makes the loss small"
    draft.at(evidence.of_node("cause", _counted(graph, entropy), "the entropy counts with a factor above 0"))
    draft.at(evidence.of_node("origin", entropy, "the entropy"))
    draft.because("the same loss multiplies log-probabilities of the policy by an advantage")
    draft.help("subtract the entropy from the loss", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _surrogate(evidence: CheckUp, graph: LossGraph, smaller: Node) -> Draft:
    draft = check.draft(evidence, "likely")
    draft.message = "the policy learns to avoid actions with an advantage: the objective is made small"
    draft.cause = "the loss adds the smaller of two products, a lower bound for what is to be made large"
    draft.at(evidence.of_node("cause", smaller, "has no minus on its way to the loss"))
    draft.because("both products multiply a ratio of probabilities of the policy by an advantage")
    draft.help("put a minus before the smaller of the two", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _is_made_large(evidence: CheckUp) -> bool:
    """Whether an optimizer maximises, or nobody knows what is done with the gradients."""
    groups = [group for each in evidence.constructions.alive() for group in each.param_groups]
    return not evidence.optimized or any(group.get("maximize") or float(group.get("lr", 0)) < 0 for group in groups)


def _counted(graph: LossGraph, entropy: Node) -> Node:
    """The last factor of an entropy before it becomes a part of a sum; the sum, where there is no factor."""
    on_the_way, last = {entropy.number}, None
    for node in sorted(graph.nodes, key=lambda each: each.sequence):
        if node.sequence > entropy.sequence and not on_the_way.isdisjoint(node.behind):
            if node.kind in ("AddBackward", "SubBackward", "RsubBackward") and not node.shape and not node.missing:
                return last or node
            on_the_way.add(node.number)
            last = node if node.factor is not None else last
    return last or entropy


def _advantage(evidence: CheckUp, graph: LossGraph, term: PolicyTerm) -> Draft:
    names = [
        name for leaf in graph.leaves_below(term.other.number if term.other else 0) if (name := evidence.name_of(leaf))
    ]
    draft = check.draft(evidence, "likely")
    draft.message = "the loss of the policy also changes the estimate that its advantage is computed from"
    draft.cause = "the advantage has a graph here, so gradients of the policy term go through it"
    draft.at(evidence.of_node("cause", term.product, "the advantage is not detached"))
    draft.at(evidence.of_node("origin", term.other, "the advantage"))
    draft.because(f"the policy term reaches `{names[-1]}` through the advantage" if names else "")
    draft.help("detach the advantage in the policy term", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")
