"""Words of the source that several stages must understand alike."""

from __future__ import annotations

import ast

import pytest

from torchmedic.source.syntax import callee, calls_backward, cuts_graph, first_line, makes_number


def call(text: str) -> ast.Call:
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    return node


@pytest.mark.parametrize(
    "text",
    [
        *("loss.backward()", "scaler.scale(loss).backward()", "accelerator.backward(loss)", "engine.backward(loss)"),
        *("self.manual_backward(loss)", "torch.autograd.grad(loss, x)", "grad(loss, x)"),
    ],
)
def test_every_way_to_run_a_backward_is_known(text: str) -> None:
    assert calls_backward(ast.parse(f"if True:\n    {text}\n"))


def test_a_gradient_that_is_read_runs_no_backward() -> None:
    assert not calls_backward(ast.parse("norm = weight.grad.norm()\n"))


@pytest.mark.parametrize(
    ("text", "cuts", "is_number"),
    [
        ("loss.item()", True, True),
        ("float(loss)", True, True),
        ("loss.float()", False, False),  # a tensor of another dtype, with its graph
        ("loss.detach()", True, False),
        ("h.detach_()", True, False),
        ("out.argmax(1)", True, False),
        ("torch.stack(losses)", False, False),
    ],
)
def test_a_method_and_a_function_of_the_same_name_differ(text: str, cuts: bool, is_number: bool) -> None:
    assert (cuts_graph(call(text)), makes_number(call(text))) == (cuts, is_number)


def test_a_call_has_the_last_name_and_a_function_begins_with_its_decorators() -> None:
    assert (callee(call("self.model.net(x)")), callee(call("nets[0](x)"))) == ("net", "")
    (function,) = ast.parse("@one\n@two\ndef step():\n    pass\n").body
    assert first_line(function) == 1
