"""Other source for a line to blame is what a person would have written, and compiles."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import pytest
from torch import nn

from torchmedic.diagnose.cures.edits import left_out, out_of_place, rewritten, statement_at
from torchmedic.diagnose.cures.graph_edits import detached_in, retained, uncut
from torchmedic.diagnose.cures.ranges import _with_number
from torchmedic.replay.step.trial import edited
from torchmedic.replay.trace.microscope import Spot


def spot_of(folder: Path, source: str, part: str = "") -> Spot:
    """The place of a part of a source file, or of all of its first line."""
    path = folder / "lines.py"
    path.write_text(source + "\n")
    linecache.checkcache()
    for number, line in enumerate(source.splitlines(), 1):
        start = line.encode().find((part or line.strip()).encode())
        if start >= 0:
            return Spot(str(path), number, start, number, start + len((part or line.strip()).encode()), "f")
    raise AssertionError(part)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("h += x", "h = h + x"),
        ("h -= x + 1", "h = h - (x + 1)"),
        ("self.h *= self.w[0]", "self.h = self.h * self.w[0]"),
        ("h **= 2", "h = h ** 2"),
        ("h[0] = 1.0", "h = h.clone(); h[0] = 1.0"),
        ("h[:, 0] += x", "h = h.clone(); h[:, 0] += x"),
        ("self.out[t] = h", "self.out = self.out.clone(); self.out[t] = h"),
        ("h.relu_()", "h = h.relu()"),
        ('h.clamp_(min=0, max="a")', 'h = h.clamp(min=0, max="a")'),
        ("y = h.exp_() * 2", "y = h.exp() * 2"),
        ("y = F.relu(h, inplace=True)", "y = F.relu(h, inplace=False)"),
        ("F.relu(h, inplace=True)", "h = F.relu(h, inplace=False)"),
        ("torch.sigmoid_(h)", "h = torch.sigmoid(h)"),
        ("torch.add(a, b, out=h)", "h = torch.add(a, b)"),
        ("h.zero_()", "h = torch.zeros_like(h)"),
        ("h.fill_(2)", "h = torch.full_like(h, 2)"),
        ("h.copy_(x + 1)", "h = torch.empty_like(h).copy_(x + 1)"),
        ("h.t()[0].mul_(2)", "h = h.clone(); h.t()[0].mul_(2)"),
        ("ü += x", "ü = ü + x"),
    ],
)
def test_the_first_way_out_of_place(tmp_path: Path, line: str, wanted: str) -> None:
    edit = next(edit for _, edit in out_of_place(spot_of(tmp_path, line)))

    assert edit.text == wanted
    source, patch = edited(edit)
    ast.parse(source)
    assert patch.splitlines()[-1] == f"+{wanted}"


def test_a_read_of_what_is_written_is_copied(tmp_path: Path) -> None:
    texts = [edit.text for _, edit in out_of_place(spot_of(tmp_path, "h[t] = h[t] * h[t - 1].exp()"))]

    assert "h[t] = h[t].clone() * h[t - 1].clone().exp()" in texts


@pytest.mark.parametrize("line", ["h = h + 1", "x.requires_grad_()", "h.detach_()", "if x: pass", "nn.init.zeros_(w)"])
def test_what_writes_nothing_is_left_alone(tmp_path: Path, line: str) -> None:
    assert list(out_of_place(spot_of(tmp_path, line))) == []


def test_statements_on_one_line_are_told_apart(tmp_path: Path) -> None:
    spot = spot_of(tmp_path, "a += 1; b += 2; c += 3", "b += 2")

    node = statement_at(spot)
    assert node is not None
    assert ast.unparse(node) == "b += 2"
    edit = left_out(spot)
    assert edit is not None
    assert edited(edit)[0] == "a += 1; pass; c += 3\n"


def test_lines_of_a_call_are_joined(tmp_path: Path) -> None:
    spot = spot_of(tmp_path, "h.add_(\n    x,  # a note\n    alpha=2,\n)", "h.add_(")
    node = statement_at(spot)
    assert node is not None

    assert rewritten(spot.file, node) == "h.add_(x, alpha=2)"


@pytest.mark.parametrize(
    ("line", "name", "is_item", "wanted"),
    [
        ("out, h = rnn(x, h)", "h", False, "out, h = rnn(x, h.detach())"),
        ("total += loss", "total", False, "total = total.detach() + loss"),
        ("y = self.rnn(x, self.h)", "self.h", False, "y = self.rnn(x, self.h.detach())"),
        ("out, s = rnn(x, s)", "s", True, "out, s = rnn(x, tuple(part.detach() for part in s))"),
    ],
)
def test_a_variable_is_used_without_its_history(
    tmp_path: Path, line: str, name: str, is_item: bool, wanted: str
) -> None:
    edit = next(detached_in(spot_of(tmp_path, line), name, is_item=is_item))

    assert edited(edit)[0] == f"{wanted}\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("loss.backward()", "loss.backward(retain_graph=True)"),
        ("loss.backward(gradient)", "loss.backward(gradient, retain_graph=True)"),
        ("scaler.scale(loss).backward(retain_graph=False)", "scaler.scale(loss).backward(retain_graph=True)"),
    ],
)
def test_a_graph_is_kept(tmp_path: Path, line: str, wanted: str) -> None:
    edit = next(edit for _, edit in retained(spot_of(tmp_path, line), differentiable=False))

    assert edited(edit)[0] == f"{wanted}\n"


@pytest.mark.parametrize(
    ("line", "part", "name", "wanted"),
    [
        ("loss = f(out.detach(), y)", "out.detach()", "detach", "loss = f(out, y)"),
        ("loss = net(x).data", "net(x).data", "data", "loss = net(x)"),
        ("loss = torch.tensor(f(x))", "torch.tensor(f(x))", "tensor", "loss = f(x)"),
        ("loss = torch.tensor([a, b]).sum()", "torch.tensor([a, b])", "tensor", "loss = torch.stack([a, b]).sum()"),
        ("total += float(f(x))", "float(f(x))", "__float__", "total += f(x)"),
    ],
)
def test_a_cut_is_left_out(tmp_path: Path, line: str, part: str, name: str, wanted: str) -> None:
    edit = next(edit for _, edit in uncut(spot_of(tmp_path, line, part), name))

    assert edited(edit)[0] == f"{wanted}\n"


@pytest.mark.parametrize(
    ("layer", "text", "wanted"),
    [
        (nn.Embedding, "nn.Embedding(12, 12)", "nn.Embedding(14, 12)"),
        (nn.Embedding, "nn.Embedding(n, 12)", None),
        (
            nn.Embedding,
            "nn.Embedding(embedding_dim=12, num_embeddings=12)",
            "nn.Embedding(embedding_dim=12, num_embeddings=14)",
        ),
        (nn.Linear, "nn.Linear(12, 12)", "nn.Linear(12, 14)"),
        (nn.Linear, "nn.Linear(12, classes)", None),
    ],
)
def test_the_number_of_rows_is_changed_and_no_other(layer: type, text: str, wanted: str | None) -> None:
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    assert _with_number(text, node, layer, 12, 14) == wanted


@pytest.mark.parametrize("more", ["", "    print(t)\n"])
def test_a_new_tensor_that_nobody_reads_is_no_way(tmp_path: Path, more: str) -> None:
    source = f"def follow(weights):\n  for t in weights:\n    t.mul_(0.9)\n{more}"
    found = [edit.text for _, edit in out_of_place(spot_of(tmp_path, source, "t.mul_(0.9)"))]

    assert ("t = t.mul(0.9)" in found) is bool(more)
