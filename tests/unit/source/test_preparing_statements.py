"""The slice of a script that made a variable."""

from __future__ import annotations

import ast

import pytest

from torchmedic.source.lookup.preparing_statements import statements_making

FIXED = frozenset({"torch", "np", "load", "spoil", "Net"})


@pytest.mark.parametrize(
    ("source", "line", "kept"),
    [
        ("net = Net()\nx = load()\ny = load()\nx = x / 2\nfor b in x:\n    pass\n", 5, ["x = load()", "x = x / 2"]),
        ("raw = load()\nx = raw\nx[3] = 0\nspoil(x)\nf(1)\n", 5, ["raw = load()", "x = raw", "x[3] = 0", "spoil(x)"]),
        ("torch.manual_seed(0)\nx = torch.rand(3)\nfit(x)\n", 3, ["torch.manual_seed(0)", "x = torch.rand(3)"]),
        ("if True:\n    x = load()\n    fit(x)\n    x = None\n", 3, ["x = load()"]),
        ("fit(x)\n", 1, []),
    ],
    ids=["what-it-depends-on", "writes-into-it", "seeds", "inside-a-block", "made-elsewhere"],
)  # fmt: skip
def test_the_statements_that_a_variable_depends_on_are_kept(source: str, line: int, kept: list[str]) -> None:
    found = statements_making("x", ast.parse(source).body, line, FIXED)
    assert [ast.unparse(each) for each in found.statements] == kept


def test_what_is_written_into_and_not_made_is_told() -> None:
    body = ast.parse("table[2] = 0\nx = table * 2\nfit(x)\n").body
    assert statements_making("x", body, 3, FIXED).overwritten == {"table"}
