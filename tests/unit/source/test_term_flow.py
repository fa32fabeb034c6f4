"""Which expressions a term of a sum was computed from."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from types import CodeType

from torchmedic.source.lookup.term_flow import Callees, parts_behind, span_of, sum_at, terms_of
from torchmedic.source.spots import Spot


def flow_of(tmp_path: Path, source: str, sum_text: str, index: int | None = None, called: str = "") -> set[str]:
    """What one term of the sum with this text was computed from: the right operand, or the term at a position.

    `called` is the text of an expression of the sum that called the first function of the source.
    """
    file = tmp_path / "loop.py"
    file.write_text(source)
    linecache.checkcache(str(file))
    line, text = next((number, text) for number, text in enumerate(source.splitlines(), 1) if sum_text in text)
    start = text.index(sum_text)
    found = sum_at(Spot(str(file), line, start, line, start + len(sum_text), ""))
    assert found is not None
    callees: Callees = {}
    if called:
        at = text.index(called)
        inner = next(each for each in compile(source, str(file), "exec").co_consts if isinstance(each, CodeType))
        callees[span_of(Spot(str(file), line, at, line, at + len(called), ""))] = inner
    terms = terms_of(found, str(file), index=index, is_right=True, callees=callees)
    return {ast.unparse(each.expression) for each in parts_behind(terms)}


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


def test_a_term_of_a_sum_of_a_list_is_found_by_its_position(tmp_path: Path) -> None:
    source = "kl = f(z).item()\nloss = sum([rec, 0.1 * kl, g(x)])\n"
    assert flow_of(tmp_path, source, "sum([rec, 0.1 * kl, g(x)])", index=1) == {"0.1 * kl", "f(z).item()"}


def test_a_term_of_a_stack_is_found_in_the_order_in_which_a_list_was_filled(tmp_path: Path) -> None:
    source = "parts = [rec]\nparts.append(a)\nparts.append(b)\nloss = torch.stack(parts).sum()\n"
    assert flow_of(tmp_path, source, "torch.stack(parts)", index=2) == {"b"}


def test_a_term_of_a_weighted_sum_is_found_in_a_dict(tmp_path: Path) -> None:
    source = "parts = {'rec': f(x), 'kl': g(x)}\nloss = sum(w[k] * v for k, v in parts.items())\n"
    flow = flow_of(tmp_path, source, "sum(w[k] * v for k, v in parts.items())", index=1)
    assert flow == {"w[k] * v", "g(x)"}


def test_terms_that_a_comprehension_leaves_out_are_not_counted(tmp_path: Path) -> None:
    source = "parts = {'rec': f(x), 'kl': g(x)}\nloss = sum(v for k, v in parts.items() if k != 'rec')\n"
    assert flow_of(tmp_path, source, "sum(v for k, v in parts.items() if k != 'rec')", index=0) == set()


def test_a_term_is_found_in_what_another_function_returns(tmp_path: Path) -> None:
    source = "def losses(x):\n    kl = g(x).item()\n    return f(x), kl\n\ntotal = sum(losses(x))\n"
    assert flow_of(tmp_path, source, "sum(losses(x))", index=1, called="losses(x)") == {"kl", "g(x).item()"}
