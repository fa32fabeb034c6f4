"""Which expressions a term of a sum was computed from."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

from torchmedic.source.lookup.term_flow import expressions_behind, operands, sum_at
from torchmedic.source.spots import Spot


def flow_of(tmp_path: Path, source: str, sum_text: str) -> set[str]:
    """What the right operand of the sum with this text was computed from."""
    file = tmp_path / "loop.py"
    file.write_text(source)
    linecache.checkcache(str(file))
    line, text = next((number, text) for number, text in enumerate(source.splitlines(), 1) if sum_text in text)
    start = text.index(sum_text)
    found = sum_at(Spot(str(file), line, start, line, start + len(sum_text), ""))
    assert found is not None
    return {ast.unparse(each) for each in expressions_behind(operands(found)[1], found, str(file))}


def test_names_are_followed_to_what_they_were_last_assigned(tmp_path: Path) -> None:
    source = "a = x.item()\na = g(x)\nb = 2 * a\nloss = h(x) + b\na = x.detach()\n"
    assert flow_of(tmp_path, source, "h(x) + b") == {"b", "2 * a", "g(x)"}


def test_containers_are_followed_to_what_was_put_into_them(tmp_path: Path) -> None:
    source = "parts = {}\nparts['kl'] = kl.item()\nloss = rec + parts['kl']\n"
    assert "kl.item()" in flow_of(tmp_path, source, "rec + parts['kl']")


def test_the_sum_of_an_earlier_round_is_left_out(tmp_path: Path) -> None:
    source = "term = 0\nfor x in data:\n    term = g(x) + term\n"
    assert flow_of(tmp_path, source, "g(x) + term") == {"term", "0"}


def test_an_augmented_assignment_is_a_sum(tmp_path: Path) -> None:
    source = "loss = f(x)\npenalty = g(x)\nloss += 0.1 * penalty\n"
    assert flow_of(tmp_path, source, "loss += 0.1 * penalty") == {"0.1 * penalty", "g(x)"}
