"""What the source says of memory: what gives things to a library, and whether all pairs are meant."""

from __future__ import annotations

import ast

import pytest
import torch

from torchmedic.detect.failures import exhaustion as hidden
from torchmedic.diagnose.rules.memory.accidental_broadcast import _is_meant
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.source.fillers import given_at
from torchmedic.observe.memory.host import HostMemory
from torchmedic.observe.step.step_notes import held


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("a.sum(1, keepdim=True) + b.sum(1)", True),
        ("a.sum(1, keepdim=False) + b.sum(1)", False),
        ("aa + bb - 2 * a @ b.T", True),
        ("aa + bb - 2 * torch.mm(a, b.T)", True),
        ("x[:, None] - y", True),
        ("x - y", False),
        ("(x @ w) - y", False),  # the product is a side itself: a prediction
        ("(x - y) * (a @ b)", False),
    ],
)
def test_whether_all_pairs_are_meant(source: str, meant: bool) -> None:
    tree = ast.parse(source)
    pairs = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)]
    assert _is_meant(pairs[-1], tree) is meant


def test_the_line_that_gives_to_an_object_of_a_library() -> None:
    source = """
for x, y in loader:
    metric.update(x, y)
    self.metric(x)
    metrics["metric"].add(x)
    metric.to(device)
    metric.compute()
    other.update(x)
"""
    library = torch.nn.Identity()
    kept = Holder("metric.preds", [], "", "", None, False, parent=library, attribute="preds")
    lines = [call.lineno for _, call in given_at(kept, [("train.py", ast.parse(source))])]
    assert lines == [3, 4, 5]
    own = kept._replace(parent=type("Own", (torch.nn.Identity,), {"__module__": __name__})())
    assert list(given_at(own, [("train.py", ast.parse(source))])) == []  # its own lines tell more


def test_a_sparse_tensor_does_not_know_its_bytes() -> None:
    small, sparse = torch.zeros(3), torch.eye(3).to_sparse()
    assert held(small) is small
    assert held(sparse)() is sparse


def test_words_that_may_mean_memory_do_so_at_a_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    words, kinds = "could not create a primitive", frozenset({"RuntimeError"})
    for left, is_memory in ((1 << 20, True), (1 << 30, False)):
        taken = HostMemory(address_limit=8 << 30, address_space=(8 << 30) - left, total=64 << 30)
        monkeypatch.setattr(hidden, "host_memory", lambda taken=taken: taken)
        assert (hidden.hidden_exhaustion(kinds, words) is not None) is is_memory
        assert hidden.hidden_exhaustion(kinds, "shapes do not match") is None
    monkeypatch.setattr(hidden, "host_memory", HostMemory)  # no limit at all
    assert hidden.hidden_exhaustion(kinds, words) is None
