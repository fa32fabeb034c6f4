"""A recorded failure becomes a small script that fails in the same way, and never anything that was not recorded."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from torchmedic.errors import UnreadableRun
from torchmedic.repro import recipe as recipes
from torchmedic.repro import store
from torchmedic.repro.arguments import Inputs, NotRecordable
from torchmedic.repro.program import Program, fragment, pattern
from torchmedic.repro.recipe import Bad, Input, Line, Plain, Raises, Recipe, Ref, Slice, Special
from torchmedic.repro.script import MAX_INLINE_LINES, text
from torchmedic.repro.search import Budget
from torchmedic.repro.shrink import shrunk
from torchmedic.repro.wording import call

HEADER = Recipe(code="TM201", name="division-by-zero", message="0 / 0", place="train.py:3", source='a = "x" / """y"""')


def program(target: str, *args: Any, outcome: Any = None, grad: str = "no", **kwargs: Any) -> Program:
    """A program of one call; what it does wrong is found out unless it is given."""
    inputs = Inputs()
    given = tuple(inputs.argument(value) for value in args)
    named = {key: inputs.argument(value, key) for key, value in kwargs.items()}
    inputs.specs = [msgspec.structs.replace(spec, grad=grad) for spec in inputs.specs] if grad != "no" else inputs.specs
    lines = (Line(target=target, args=given, kwargs=named, result="result"),)
    made = Program(msgspec.structs.replace(HEADER, inputs=tuple(inputs.specs), lines=lines), inputs.tensors)
    if outcome is None:
        error = made.error()
        assert error is not None
        outcome = Raises(kind=type(error).__name__, fragment=fragment(error), pattern=pattern(error))
    made = made.with_recipe(outcome=outcome)
    assert made.holds()
    return made


def nan(**more: Any) -> Bad:
    return Bad(kind="nan", of="result", **more)


def inf(**more: Any) -> Bad:
    return Bad(kind="inf", of="result", **more)


def run(folder: Path, made: Program) -> str:
    """Write the script, run it in this process, and return its text; it must reproduce."""
    path = folder / "repro.py"
    source, loads = text(made, path.with_suffix(".safetensors"))
    path.write_text(source)
    if loads:
        values = store.encoded(made)
        assert values is not None
        path.with_suffix(".safetensors").write_bytes(values)
    runpy.run_path(str(path), run_name="__main__")  # SystemExit if it does not fail
    assert source.count("\n") <= MAX_INLINE_LINES
    assert source.isascii()
    return source


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def healthy(*shape: int) -> torch.Tensor:
    return noise(*shape).abs() + 0.5


def test_one_bad_element_is_what_remains(tmp_path: Path) -> None:
    divisor = healthy(33, 1)
    divisor[21] = 0
    dividend = noise(33, 17)
    dividend[21] = 0

    small = shrunk(program("torch.div", dividend, divisor, outcome=nan()))

    assert small.size == 2
    assert "torch.tensor([0.0])" in run(tmp_path, small)


def test_values_are_made_simple_but_zero_stays_zero_and_nothing_else_becomes_it(tmp_path: Path) -> None:
    overflow = shrunk(program("torch.div", torch.tensor([3.7]), torch.tensor([1.3e-39]), outcome=inf()))
    negative = shrunk(program("torch.log", torch.tensor([2.0, -0.3127]), outcome=nan()))
    big = shrunk(program("torch.exp", torch.tensor([1.0, 103.278]), outcome=inf()))

    assert 0 < overflow.tensors["y"].item() < 1e-38
    assert negative.tensors["x"].item() == -1
    assert big.tensors["x"].item() == 100
    run(tmp_path, big)


def test_infinity_is_no_fair_exchange_for_nan() -> None:
    both = program("torch.div", torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), outcome=nan())

    assert shrunk(both).tensors["x"].tolist() == [0]


def test_a_mask_keeps_its_infinities(tmp_path: Path) -> None:
    scores = noise(2, 5, 7)
    scores[1, 3] = -math.inf

    small = shrunk(program("torch.softmax", scores, dim=-1, outcome=nan(given_inf=True)))

    assert small.tensors["x"].tolist() == [-math.inf]
    assert "-torch.inf" in run(tmp_path, small)


def test_matrices_shrink_along_the_dimension_that_they_share(tmp_path: Path) -> None:
    a, b = noise(24, 40).half(), noise(40, 24).half()
    a[5], b[:, 9] = 200.0, 200.0

    small = shrunk(program("torch.mm", a, b, outcome=inf()))

    assert small.tensors["x"].shape[0] == small.tensors["y"].shape[1] == 1
    assert small.tensors["x"].shape[1] == small.tensors["y"].shape[0] <= 3
    run(tmp_path, small)


def test_shapes_that_do_not_fit_need_no_values(tmp_path: Path) -> None:
    small = shrunk(program("torch.matmul", noise(64, 100), noise(99, 64)))

    assert small.size == 0
    assert all(max(given.shape) <= 2 for given in small.inputs)
    run(tmp_path, small)


def test_an_index_stays_on_its_side_of_the_range(tmp_path: Path) -> None:
    table, low, high = noise(50, 8), torch.randint(0, 50, (6, 7)), torch.randint(0, 50, (6, 7))
    low[2, 3], high[4, 5] = -7, 50

    negative = shrunk(program("torch.nn.functional.embedding", low, table))
    large = shrunk(program("torch.nn.functional.embedding", high, table))

    assert negative.tensors["x"].item() < 0
    assert large.tensors["x"].item() >= large.tensors["y"].shape[0]
    run(tmp_path, large)


def test_innocent_arguments_go(tmp_path: Path) -> None:
    parts = [noise(4, 3) for _ in range(20)] + [noise(4, 5)]
    bias = noise(4)

    joined = shrunk(program("torch.cat", parts, dim=0))
    linear = shrunk(program("torch.nn.functional.linear", noise(5, 7), noise(4, 8), bias))

    assert len(joined.inputs) == 2
    assert [given.name for given in linear.inputs] == ["x", "y"]
    run(tmp_path, joined)


def test_an_argument_that_makes_the_nan_stays() -> None:
    ignored = program("torch.nn.functional.nll_loss", noise(6, 3), torch.full((6,), 2), ignore_index=2, outcome=nan())

    assert "ignore_index=2" in call(shrunk(ignored).recipe.lines[0])


def test_a_gradient_and_the_simplest_way_to_it(tmp_path: Path) -> None:
    inputs = Inputs()
    inputs.add(torch.tensor([4.0, 0.0, 1.7]), "x", "leaf")
    inputs.add(torch.tensor([0.3, 0.25, 0.7]), "gradient", "no")
    lines = (
        Line(target="torch.sqrt", args=(Ref("x"),), result="result"),
        Line(target="Tensor.backward", args=(Ref("result"), Ref("gradient"))),
    )
    outcome = Bad(kind="inf", of="x", gradient=True)
    made = Program(
        msgspec.structs.replace(HEADER, inputs=tuple(inputs.specs), lines=lines, outcome=outcome), inputs.tensors
    )

    source = run(tmp_path, shrunk(made))

    assert "x = torch.tensor([0.0], requires_grad=True)" in source
    assert "result.sum().backward()" in source


def test_what_lies_in_memory_is_kept_if_it_matters(tmp_path: Path) -> None:
    for tensor in (noise(4, 6).t(), noise(6, 8)[:, :3], noise(1, 6).expand(4, 6), noise(4, 6, 5)[..., ::2, ::2]):
        small = shrunk(program("Tensor.view", tensor, -1))

        assert small.inputs[0].layout
        run(tmp_path, small)

    fits = shrunk(program("torch.matmul", noise(4, 6).t(), noise(3, 3)))
    assert not fits.inputs[0].layout


def test_leaves_views_and_computed_tensors_fail_each_in_its_way(tmp_path: Path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf.view(3, 1), leaf[:2]):
        run(tmp_path, shrunk(program("operator.iadd", tensor, 1)))
    assert program("Tensor.numpy", leaf * 2).inputs[0].grad == "computed"


def test_big_values_are_in_a_file_beside_the_script(tmp_path: Path) -> None:
    made = program("torch.div", healthy(20, 20), torch.cat([torch.zeros(1), healthy(399)]).view(20, 20), outcome=inf())

    source = run(tmp_path, made)

    assert 'tensors["x"]' in source
    assert (tmp_path / "repro.safetensors").stat().st_size < 8000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 / 3, -0.0, 1e-45, 3e38]),
        torch.tensor([1 / 3], dtype=torch.float64),
        torch.tensor([0.1, 65504.0], dtype=torch.float16),
        torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.tensor(7, dtype=torch.int32),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([1 + 2j, -1j]),
        torch.tensor([math.nan, math.inf, -math.inf]),
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.int64),
    ],
    ids=str,
)
def test_values_in_the_text_are_the_values(tmp_path: Path, tensor: torch.Tensor) -> None:
    recipe = msgspec.structs.replace(
        HEADER,
        inputs=(Input(name="x", dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)),),
        lines=(Line(target="Tensor.clone", args=(Ref("x"),), result="result"),),
        outcome=nan(),
    )
    source, _ = text(Program(recipe, {"x": tensor}), tmp_path / "x.safetensors")
    names: dict[str, Any] = {}
    exec(source.split("result =")[0], names)

    assert names["x"].dtype is tensor.dtype
    assert names["x"].shape == tensor.shape
    assert torch.equal(names["x"].nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_a_script_says_when_it_does_not_fail(tmp_path: Path) -> None:
    wrong = program("torch.div", torch.zeros(1), torch.zeros(1), outcome=nan()).with_tensors({"y": torch.ones(1)})
    (tmp_path / "repro.py").write_text(text(wrong, tmp_path / "x.safetensors")[0])

    with pytest.raises(SystemExit, match="not reproduced"):
        runpy.run_path(str(tmp_path / "repro.py"))


def test_the_search_ends(tmp_path: Path) -> None:
    class Counted(Program):
        tries = 0

        def holds(self) -> bool:
            Counted.tries += 1
            return super().holds()

    plain = program("torch.matmul", noise(64, 100), noise(99, 64))
    shrunk(Counted(plain.recipe, plain.tensors), Budget(queries=5, seconds=60))
    assert Counted.tries <= 6


def test_running_a_program_draws_nothing_from_the_users_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    program("torch.nn.functional.dropout", torch.ones(3), p=2.0)

    assert torch.equal(torch.rand(2), expected)


def test_names_come_from_the_user_where_they_can() -> None:
    inputs = Inputs()
    shared = torch.ones(1)

    names = [
        inputs.add(tensor, hint)
        for tensor, hint in (
            (shared, "logits"),
            (torch.ones(2), "self.fc.weight"),
            (torch.ones(3), "f(x)"),
            (shared, "again"),
            (torch.ones(4), "torch"),
            (torch.ones(5), "lambda"),
            (torch.ones(6), "logits"),
        )
    ]

    assert names == ["logits", "weight", "x", "logits", "y", "z", "logits_2"]


def test_what_cannot_be_kept_is_refused() -> None:
    for value in (object(), {"a": 1}, torch.eye(2).to_sparse(), noise):
        with pytest.raises(NotRecordable):
            Inputs().argument(value)


@pytest.mark.parametrize(
    ("line", "source"),
    [
        (Line(target="operator.pow", args=(Plain(-1), Ref("x"))), "(-1) ** x"),
        (Line(target="operator.getitem", args=(Ref("x"), Slice((Plain(1), Plain(None), Plain(2))))), "x[1::2]"),
        (Line(target="call", args=(Ref("layer"), Ref("x"))), "layer(x)"),
        (Line(target="torch.full", args=(Special("-inf"),), kwargs={"dtype": Special("torch.half")}),
         "torch.full(-torch.inf, dtype=torch.half)"),
    ],
)  # fmt: skip
def test_calls_are_written_as_people_write_them(line: Line, source: str) -> None:
    assert call(line) == source


def written(folder: Path, **changes: Any) -> Path:
    made = program("torch.div", torch.zeros(3), torch.zeros(3), outcome=nan())
    path = recipes.json_path(folder, 0)
    recipes.write(path, msgspec.structs.replace(made.recipe, **changes), store.encoded(made))
    return path


def test_a_recording_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path)

    back = store.read(recipes.read(path), recipes.values_path(path))

    assert back.holds()


@pytest.mark.parametrize(
    "line",
    [
        Line(target="torch.hub.load"),
        Line(target="torch.load", args=(Plain("x"),)),
        Line(target="os.system", args=(Plain("true"),)),
        Line(target="torch.ops.aten.from_file.default"),
        Line(target="torch.div(x); import os"),
        Line(target="torch.div", args=(Ref("x); import os"),)),
        Line(target="torch.div", args=(Special("torch.os.system('true')"),)),
        Line(target="torch.vmap", args=(Special("torch.load"),)),
        Line(target="call", args=(Ref("result"), Plain("x"))),
        Line(target="torch.vmap", args=(Ref("x"),), result="layer"),
        Line(target="torch.div", kwargs={"a=1) or f(b": Plain(1)}),
        Line(target="torch.div", result="a.b"),
    ],
)
def test_a_recording_cannot_bring_code_in(tmp_path: Path, line: Line) -> None:
    path = written(tmp_path, lines=(line,))

    with pytest.raises(UnreadableRun, match="damaged"):
        recipes.read(path)


def test_damage_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    recipe, values = recipes.read(path), recipes.values_path(path)
    whole = values.read_bytes()
    for data in (b"", whole[:20], whole[:-4], b"\xff" * 64):
        values.write_bytes(data)
        with pytest.raises(UnreadableRun, match=r"damaged|as it should be"):
            store.read(recipe, values)
    values.unlink()
    with pytest.raises(UnreadableRun, match="No such file"):
        store.read(recipe, values)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UnreadableRun, match="damaged"):
        recipes.read(path)


def test_a_note_cannot_leave_its_comment_nor_a_message_its_docstring(tmp_path: Path) -> None:
    made = program("torch.div", torch.zeros(1), torch.zeros(1), outcome=nan())
    hostile = 'x"""\nraise ValueError\n"""\\'
    line = msgspec.structs.replace(made.recipe.lines[0], note="a\nraise ValueError")

    run(tmp_path, made.with_recipe(message=hostile, source=hostile, place=hostile, lines=(line,)))
