"""Where a value came from, and where a layer was built."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from torchmedic.source.bindings import ENTRY, reaching
from torchmedic.source.live_frames import Frame, frames_of
from torchmedic.source.lookup.failing_call import raising_call
from torchmedic.source.lookup.layer_construction import built_at
from torchmedic.source.lookup.origins import origin_of


def bindings(source: str, name: str) -> list[int]:
    """The lines that may bind a name when the line marked `# here` begins; 0 for the start of the function."""
    source = textwrap.dedent(source)
    tree = ast.parse(source)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "# here" in text)
    target = max(
        (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == line),
        key=lambda node: node.col_offset,
    )
    return sorted(0 if node is ENTRY else node.lineno for node in reaching(tree.body, name, target))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        pytest.param("x = 1\nx = 2\nf(x)  # here", [2], id="the last one"),
        pytest.param("x = 1\nx += 1\nf(x)  # here", [2], id="augmented"),
        pytest.param("x[0] = 1\nf(x)  # here", [0], id="an item binds no name"),
        pytest.param("x = 1\nif c:\n    x = 2\nf(x)  # here", [1, 3], id="a branch may not be taken"),
        pytest.param("if c:\n    x = 1\nelse:\n    x = 2\nf(x)  # here", [2, 4], id="two branches"),
        pytest.param("x = 1\nif c:\n    x = 2\n    raise E\nf(x)  # here", [1], id="a branch that raises"),
        pytest.param("x = 1\nif c:\n    x = 2\n    f(x)  # here", [3], id="inside the branch"),
        pytest.param("for x in y:\n    f(x)  # here", [1], id="a loop variable"),
        pytest.param("h = 0\nfor x in y:\n    f(h)  # here\n    h = x", [1, 4], id="what the last iteration left"),
        pytest.param("for a in b:\n    x = 1\n    f(x)  # here\n    x = 2", [2], id="bound anew in each iteration"),
        pytest.param("x = 0\nwhile c:\n    x = 1\n    break\nf(x)  # here", [1, 3], id="a loop that may not run"),
        pytest.param("try:\n    x = 1\nexcept E:\n    x = 2\nf(x)  # here", [2, 4], id="try"),
        pytest.param("x = 0\ntry:\n    x = g()\nexcept E:\n    f(x)  # here", [1, 3], id="in a handler"),
        pytest.param("with g() as x:\n    f(x)  # here", [1], id="with"),
        pytest.param("a, (x, *b) = y\nf(x)  # here", [1], id="a part of a tuple"),
        pytest.param("if (x := g()):\n    f(x)  # here", [1], id="walrus"),
        pytest.param("x = 1\ndef g():\n    x = 2\nf(x)  # here", [1], id="not that of another function"),
        pytest.param("import a.b as x\nf(x)  # here", [1], id="import"),
        pytest.param("match y:\n    case 1:\n        x = 1\nf(x)  # here", [0, 3], id="match"),
    ],
)
def test_reaching_definitions(source: str, lines: list[int]) -> None:
    assert bindings(source, "h" if "f(h)" in source else "x") == lines


def frames(tmp_path: Path, source: str) -> list[Frame]:
    """The frames of a script that raises."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(source))
    code = compile(path.read_text(), str(path), "exec")
    try:
        exec(code, {"__name__": "train", "__file__": str(path)})
    except Exception as error:
        tb: TracebackType | None = error.__traceback__
        return [frame for frame in frames_of(tb) if frame.file != __file__]
    raise AssertionError("the script must raise")


def origin_line(tmp_path: Path, source: str, position: int = 0) -> int | None:
    """The line of the origin of an operand of the innermost user expression."""
    live = frames(tmp_path, source)
    frame = next(frame for frame in reversed(live) if frame.is_user)
    call = raising_call(frame)
    assert call is not None
    found = origin_of(live, frame, call.arguments[position].node)
    return None if found is None else found.node.lineno  # type: ignore[attr-defined]


def test_through_parameters_to_the_callers_assignment(tmp_path: Path) -> None:
    source = """\
    import torch
    def product(left, right):
        return left @ right
    def step(batch):
        return product(batch, torch.ones(3, 3))
    data = torch.zeros(2, 4)
    step(data)
    """
    assert origin_line(tmp_path, source) == 6


def test_through_a_module_call(tmp_path: Path) -> None:
    source = """\
    import torch
    class Net(torch.nn.Module):
        def forward(self, x, scale=1):
            return x @ torch.ones(3, 3)
    net = Net()
    for batch in [torch.zeros(2, 4)]:
        net(batch)
    """
    assert origin_line(tmp_path, source) == 6


def test_an_argument_that_cannot_be_read_is_found_by_its_place(tmp_path: Path) -> None:
    source = """\
    import torch
    class Net(torch.nn.Module):
        def forward(self, x):
            return x @ torch.ones(3, 3)
    Net()(
        torch.randn(2, 4),
    )
    """
    assert origin_line(tmp_path, source) == 6


def test_of_a_closure_and_of_a_global(tmp_path: Path) -> None:
    source = """\
    import torch
    W = torch.ones(3, 3)
    def outer():
        x = torch.zeros(2, 4)
        def inner():
            return x @ W
        return inner()
    outer()
    """
    assert origin_line(tmp_path, source, 0) == 4
    assert origin_line(tmp_path, source, 1) == 2


def test_of_an_attribute(tmp_path: Path) -> None:
    source = """\
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(2, 4))
        def forward(self, x):
            return self.table @ x
    Net()(torch.ones(3, 3))
    """
    assert origin_line(tmp_path, source) == 5


def test_of_a_part_of_a_batch(tmp_path: Path) -> None:
    source = """\
    import torch
    for batch in [{"x": torch.zeros(2, 4)}]:
        batch["x"] @ torch.ones(3, 3)
    """
    assert origin_line(tmp_path, source) == 2


def test_what_stands_behind_the_line_has_not_run_in_the_first_round(tmp_path: Path) -> None:
    source = """\
    import torch
    x = torch.zeros(2, 3)
    for _ in range(4):
        y = x @ torch.ones(WIDTH, 3)
        x = y + 1
    """
    (tmp_path / "later").mkdir()
    assert origin_line(tmp_path, source.replace("WIDTH", "4")) == 2
    assert origin_line(tmp_path / "later", source.replace("WIDTH", "3 + _")) is None


def test_where_a_branch_may_have_been_taken_nothing_is_said(tmp_path: Path) -> None:
    source = """\
    import torch
    x = torch.zeros(2, 3)
    if x.sum() == 0:
        x = torch.zeros(2, 4)
    x @ torch.ones(3, 3)
    """
    assert origin_line(tmp_path, source) is None


LAYERS = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        {init}

    def forward(self, x):
        return {forward}


model = nn.Sequential(nn.Identity(), Block(8))
model(torch.zeros(2, 3))
"""


@pytest.mark.parametrize(
    ("init", "forward", "built"),
    [
        ("self.fc = nn.Linear(n, 2)", "self.fc(x)", "nn.Linear(n, 2)"),
        ("self.fc: nn.Linear = nn.Linear(n, 2)", "self.fc(x)", "nn.Linear(n, 2)"),
        ("self.net = nn.Sequential(nn.ReLU(), nn.Linear(n, 2))", "self.net(x)", "nn.Linear(n, 2)"),
        ("self.net = nn.ModuleList([nn.Linear(n, 2) for _ in range(2)])", "self.net[1](x)", "nn.Linear(n, 2)"),
        ("self.net = nn.ModuleDict({'a': nn.Linear(n, 2)})", "self.net['a'](x)", "nn.Linear(n, 2)"),
        ("self.add_module('fc', nn.Linear(n, 2))", "self.fc(x)", "nn.Linear(n, 2)"),
        ("layers = [nn.Linear(n, 2)]; self.net = nn.Sequential(*layers)", "self.net(x)", "nn.Linear(n, 2)"),
    ],
)
def test_where_a_layer_was_built(tmp_path: Path, init: str, forward: str, built: str) -> None:
    live = frames(tmp_path, LAYERS.replace("{init}", init).replace("{forward}", forward))
    layer: Any = live[-1].module

    place = built_at(live, layer, "here")

    assert place is not None
    start = place.column - 1 - place.indent
    assert place.code[start : start + place.end_column - place.column] == built


def test_where_two_lines_could_have_built_a_layer_none_is_named(tmp_path: Path) -> None:
    init = "self.fc = nn.Linear(n, 2) if n else None\n        if n:\n            self.fc = nn.Linear(n + 1, 2)"
    live = frames(tmp_path, LAYERS.replace("{init}", init).replace("{forward}", "self.fc(x)"))
    layer: Any = live[-1].module

    place = built_at(live, layer, "here")

    assert place is None or "n + 1" in place.code


def test_where_a_layer_of_a_plain_object_was_built(tmp_path: Path) -> None:
    source = """\
    import torch
    class Trainer:
        def __init__(self):
            self.model = torch.nn.Linear(4, 2)
        def fit(self):
            self.model(torch.zeros(2, 3))
    Trainer().fit()
    """
    live = frames(tmp_path, source)
    layer: Any = live[-1].module

    place = built_at(live, layer, "here")

    assert place is not None
    assert place.line == 4
