"""Calls of modules in parts of the batch: the last resort, where nothing is left to park."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run_script
from split_cases import INNER, ROWS, WIDTH, Centred, Counting, Keeping, Wide
from torch import nn

from torchmedic.recovery.call_in_parts import CallInParts
from torchmedic.recovery.rows import CannotSplit, RowCall, settings_of
from torchmedic.recovery.split_trial import tried

TESTS = Path(__file__).parents[2]


def run(folder: Path, name: str, level: str = "safe", *, only_backward: bool = False) -> dict[str, Any]:
    script = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom split_cases import report\n"
    script += f"report({name!r}, {level!r}, {only_backward})\n"
    finished = run_script(folder, script, options=["--no-checkup"])
    assert finished.returncode == 0, finished.stderr
    assert "fault of its own" not in finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mean", "Sequential"),
        pytest.param("sum", "Sequential", marks=pytest.mark.slow),
        ("contrastive", "Sequential"),
        pytest.param("accumulation", "Sequential", marks=pytest.mark.slow),
        pytest.param("autocast", "Sequential", marks=pytest.mark.slow),
        ("encoder", "TransformerEncoderLayer"),
        ("gpt2", "GPT2MLP"),
    ],
)
def test_training_is_the_same_up_to_rounding(name: str, call: str, tmp_path: Path) -> None:
    found = run(tmp_path, name)
    assert found["survived"], found
    assert found["difference"] < (1e-2 if name == "autocast" else 1e-5)
    assert found["seen_as_before"]  # by the counter of the model, by its hooks, by the hook of a parameter
    assert set(found["how"]) == {"forward split"}
    assert found["calls"] == [call]
    assert len(found["how"]) <= 2  # each layer runs out of memory once; the next steps call it in parts at once
    assert "up to rounding" in found["lines"][0]


@pytest.mark.parametrize("name", ["mean", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_backward_that_needs_too_much(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, name, only_backward=True)
    assert found["survived"], found
    assert found["difference"] < 1e-5
    assert found["seen_as_before"]
    assert "backward split" in found["how"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dropout", "Wide: it draws random numbers (dropout), which would be others (--recover all allows it)"),
        ("batch_norm", "Wide: its rows depend on each other"),
        ("hooked", "Wide: a module has a hook, which would see the parts (--recover all allows it)"),
        ("line_search", "Wide: LBFGS calls it, which decides by small differences (--recover all allows it)"),
    ],
)
def test_refused(name: str, reason: str, tmp_path: Path) -> None:
    found = run(tmp_path, name)
    assert not found["survived"]
    assert reason in found["lines"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["centred", "counting", "keeping"])
def test_a_module_inside_one_that_is_refused(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, name)
    assert found["survived"]
    assert found["calls"] == ["Sequential"]
    assert found["difference"] < 1e-5


@pytest.mark.parametrize("name", ["dropout", "hooked"])
def test_allowed_by_all(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, name, "all")
    assert found["survived"], found
    assert found["seen_as_before"]
    assert found["how"] == ["forward random split" if name == "dropout" else "forward split"]
    assert ("as with another seed" if name == "dropout" else "up to rounding") in found["lines"][0]


class Printing(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(len(x))
        return super().forward(x)


class Rectifying(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


class WithLoss(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


class Similarities(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


class Filling(Wide):
    def forward(self, x: torch.Tensor, into: list[torch.Tensor] | None = None) -> torch.Tensor:
        found = super().forward(x)
        if into is not None:
            into.append(found)
        return found


class Elsewhere(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.given = [nn.Parameter(torch.ones(WIDTH)) * 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.given[0])


class Limited(Wide):
    """Takes a share of the rows, but at least eight: a trial with few rows takes all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.where((torch.arange(len(x)) < max(8, len(x) // 2)).unsqueeze(1), x, 0))


class Viewing(Wide):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x[:, 0]


class Telling(Wide):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return found, found.detach().numpy()


class Drawing(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random()
        return super().forward(x)


class Reading(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.names = iter(["a"] * 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(self.names)
        return super().forward(x)


class Shared(Wide):
    total = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Shared.total += 1
        return super().forward(x)


class Spectral(Wide):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.layers[0])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Limited(), "rows depend on each other"),
        (Viewing(), "a view of an argument"),
        (Telling(), "other values beside the tensors"),
        (Drawing(), "random numbers that cannot be drawn again"),
        (Reading(), "leaves a trace in Python"),
        (Shared(), "leaves a trace in Python"),
        (Spectral(), "rows depend|writes to a tensor"),
        (Wide(nn.BatchNorm1d(INNER)), "rows depend on each other"),
        (Centred(), "rows depend on each other"),
        (Counting(), "leaves a trace in Python"),
        (Keeping(), "writes to a tensor that outlives the call"),
        (Printing(), "it prints"),
        (Rectifying(), "in place"),
        (WithLoss(), "not one row for each row"),
        (Similarities(), "another shape"),
        (Filling(), "changes its arguments"),
        (Elsewhere(), "a result of other calls"),
    ],
)
def test_a_trial_finds_what_parts_would_change(module: nn.Module, reason: str) -> None:
    state = {name: each.clone() for name, each in module.state_dict().items()}
    arguments = {"into": [torch.zeros(1)]} if isinstance(module, Filling) else {}
    with pytest.raises(CannotSplit, match=reason):
        tried(RowCall(module, (torch.randn(ROWS, WIDTH),), arguments), module)
    assert all(torch.equal(each, state[name]) for name, each in module.state_dict().items())
    assert getattr(module, "calls", 0) == 0


class Batch:
    """An object with tensors that is no container."""

    def __init__(self, x: torch.Tensor, name: str) -> None:
        self.x, self.name = x, name


class Nested(Wide):
    """Nested arguments and results; weights that only some rows use; a result that lies otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: Any, *, shift: torch.Tensor, factor: float) -> Any:
        x = batch.x * factor
        if x.amax() > 3:
            x = torch.where(x > 3, x * self.rare, x)
        found = super().forward(x + shift)
        return {"out": found.t().contiguous().t(), "kept": [Batch(found * 2, batch.name), None]}


def test_parts_of_nested_arguments() -> None:
    torch.manual_seed(0)
    module, x, shift = Nested(), torch.randn(ROWS, WIDTH), torch.randn(1, WIDTH, requires_grad=True)
    x[57, 3] = 100.0  # no row of the trial, and none of the first part
    x.requires_grad_()

    def gradients(result: Any) -> list[torch.Tensor]:
        loss = (result["out"] * result["kept"][0].x).mean()
        return list(torch.autograd.grad(loss, [x, shift, *module.parameters()]))

    given = {"shift": shift, "factor": 0.5}
    wanted = module(Batch(x, "a"), **given)
    call = RowCall(module, (Batch(x, "a"),), given)
    leaves = [*tried(call, module).leaves, *module.parameters()]
    found = CallInParts(call, module, leaves, contextlib.nullcontext, draws=False).result(9)
    assert found["out"].stride() == wanted["out"].stride()
    assert found["kept"][0].name == "a"
    torch.testing.assert_close(found["out"], wanted["out"])
    torch.testing.assert_close(gradients(found), gradients(wanted))


class Passing(Wide):
    """Returns an argument, and asks whether its arguments are the same tensor; only some rows need a gradient."""

    def forward(self, x: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> Any:
        found, rows = torch.zeros_like(x), (x > 3).any(1, keepdim=True)
        if rows.any():
            found = found + rows * super().forward(x if x is other else -other)
        return found, mask, other


def test_arguments_that_come_back() -> None:
    torch.manual_seed(0)
    module, x, mask = Passing(), torch.randn(ROWS, WIDTH).clamp(max=2), torch.ones(3, 3)
    x[57, 3] = 100.0
    call = RowCall(module, (x, x, mask), {})
    assert len(call.tensors) == 2
    leaves = [*tried(call, module).leaves, *module.parameters()]
    found, *given = CallInParts(call, module, leaves, contextlib.nullcontext, draws=False).result(9)
    assert given[0] is mask
    assert given[1] is x
    found[57].sum().backward()
    gradients = [each.grad for each in module.parameters()]
    module.zero_grad()
    module(x, x, mask)[0][57].sum().backward()
    torch.testing.assert_close(gradients, [each.grad for each in module.parameters()])


def test_a_list_for_the_rows() -> None:
    with pytest.raises(CannotSplit, match="a value in Python for each row"):
        RowCall(Wide(), (torch.randn(8, WIDTH), {"lengths": [3] * 8}), {})
    RowCall(Wide(), (torch.randn(8, WIDTH), [torch.ones(2)] * 8, (1, 2)), {})


def test_what_a_verdict_depends_on() -> None:
    module, x = Wide(), torch.randn(8, WIDTH)
    before = settings_of(module)
    module.layers.mixes = True  # type: ignore[assignment]
    assert settings_of(module) != before
    assert RowCall(module, (x, True), {}).settings != RowCall(module, (x, False), {}).settings


def test_changes_in_place_are_noticed() -> None:
    module, x = Wide(), torch.randn(ROWS, WIDTH)
    call = RowCall(module, (x,), {})
    result = CallInParts(call, module, list(module.parameters()), contextlib.nullcontext, draws=False).result(9)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
