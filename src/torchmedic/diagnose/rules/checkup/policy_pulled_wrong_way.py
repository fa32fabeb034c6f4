"""A policy gradient pulls the wrong way: the loss adds the entropy of the policy, or its advantage has a graph.

What: the loss multiplies log-probabilities by an advantage, and adds the entropy of the policy with a factor above 0.
Or the advantage is a difference to an estimate that is trained, and was not detached.

Why: training makes a loss small. An entropy that is added becomes small, so the policy collapses to one action and
stops exploring; it is meant to be subtracted. Where the advantage has a graph, the policy term also changes the
estimate: the critic learns to make the advantage of likely actions large, instead of the return. No error is raised.

Cure: subtract the entropy (`loss = policy_loss - 0.01 * entropy`). Detach the advantage in the policy term
(`-(log_prob * advantage.detach()).mean()`).
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.policy_terms import PolicyTerm, added_entropies, advantages_with_graph


@rule("TM648", "policy-pulled-wrong-way")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        if not graph.complete:
            continue
        added = added_entropies(graph)
        if added:
            return _entropy(evidence, graph, added[0])
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
