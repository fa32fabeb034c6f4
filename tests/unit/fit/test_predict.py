"""`predict` counts a step to the byte, leaves no trace of it, and `assert_fits` passes and fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchmedic
from torchmedic.errors import TorchmedicError
from torchmedic.fit.fake_device import why_not
from torchmedic.records.fit import Prediction

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

WEIGHTS = 4 * (1000 * 500 + 500 + 500 * 10 + 10)


def rows_of(found: Prediction) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in found.rows:
        totals[row.kind] = totals.get(row.kind, 0) + row.nbytes
    return totals


def training(make: Callable[[Any], Any]) -> tuple[nn.Module, Any, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10))
    optimizer = make(model.parameters())
    x, y = torch.randn(64, 1000), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize(
    ("make", "state", "temporaries"),
    [
        (lambda params: torch.optim.Adam(params, 1e-3), 2 * WEIGHTS, WEIGHTS),  # the roots of all second moments
        (lambda params: torch.optim.Adam(params, 1e-3, foreach=False), 2 * WEIGHTS, None),
        (lambda params: torch.optim.AdamW(params, 1e-3, fused=True), 2 * WEIGHTS + 4 * 4, 0),  # and counts of steps
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), WEIGHTS, 0),
        (lambda params: torch.optim.SGD(params, 0.1), 0, 0),
    ],
)
def test_parameters_gradients_and_state_to_the_byte(make: Any, state: int, temporaries: int | None) -> None:
    _, _, step = training(make)
    rows = rows_of(torchmedic.predict(step))
    assert rows["parameters"] == WEIGHTS
    assert rows["gradients"] == WEIGHTS
    assert rows.get("optimizer state", 0) == state
    assert rows["batch"] == 64 * 1000 * 4 + 64 * 8
    assert rows["workspaces of cuBLAS"] == 2 * (32 << 20)  # of the script and of backward
    if temporaries is not None:
        assert rows.get("temporaries of the optimizer", 0) == temporaries


def test_rows_add_up_to_what_the_card_needs() -> None:
    _, _, step = training(lambda params: torch.optim.Adam(params, 1e-3))
    found = torchmedic.predict(step, device_name="H200")
    assert sum(row.nbytes for row in found.rows) == found.need.total
    assert found.need.allocated < found.need.reserved
    assert found.fits


def test_nothing_is_left_of_a_prediction() -> None:
    model, optimizer, step = training(lambda params: torch.optim.Adam(params, 1e-3))
    step()
    weights = [each.clone() for each in model.parameters()]
    parameters = list(model.parameters())
    moments = [optimizer.state[each]["exp_avg"].clone() for each in parameters]
    available, guard = torch.cuda.is_available(), torch.nn.Parameter.__new__
    torchmedic.predict(step)
    assert all(one is two for one, two in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in zip(weights, model.parameters(), strict=True))
    assert all(
        torch.equal(optimizer.state[each]["exp_avg"], was) for each, was in zip(parameters, moments, strict=True)
    )
    assert (torch.cuda.is_available(), torch.nn.Parameter.__new__) == (available, guard)
    step()  # still trains
    assert not torch.equal(weights[0], next(model.parameters()))


def test_assert_fits_passes_and_fails() -> None:
    _, _, step = training(lambda params: torch.optim.Adam(params, 1e-3))
    assert torchmedic.assert_fits(step, "1GiB").fits
    with pytest.raises(AssertionError, match=r"the step needs 8\d\d\.\d\d MiB, the card has 800\.00 MiB") as raised:
        torchmedic.assert_fits(step, "800MiB")
    assert re.search(r"\d MiB  optimizer state", str(raised.value))
    with pytest.raises(TypeError):
        torchmedic.assert_fits(step)


def test_activations_are_those_of_the_card() -> None:
    """A recurrent layer keeps the reserve of cuDNN, attention the sums of the flash kernel, dropout a mask of bytes."""

    def step() -> None:
        x = torch.zeros(8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        heads = F.dropout(x, 0.5).view(8, 128, 4, 16).transpose(1, 2)
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
        torch.optim.SGD([x], 0.1).step()

    rows = rows_of(torchmedic.predict(step))
    tensor = 8 * 128 * 64 * 2
    kept = tensor + tensor // 2 + tensor + 8 * 4 * 128 * 4  # dropped, mask, output, sums
    assert kept <= rows["activations"] <= kept + 64


@pytest.mark.parametrize("activation", [F.silu, F.mish])
def test_the_gradient_of_an_activation_is_one_kernel(activation: Callable[[Any], Any]) -> None:
    """GELU has one kernel in every build. A build without CUDA would take the others apart, with temporaries."""

    def step(function: Callable[[Any], Any]) -> None:
        x = torch.zeros(2**20, device="cuda", requires_grad=True)
        function(x).sum().backward()
        torch.optim.SGD([x], 0.1).step()

    peaks = [torchmedic.predict(lambda f=f: step(f)).need.allocated for f in (F.gelu, activation)]  # type: ignore[misc]
    assert peaks[0] == peaks[1]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no kernel for the norm")
def test_a_root_mean_square_norm_keeps_a_factor_for_each_row() -> None:
    def step() -> None:
        x = torch.zeros(2048, 512, device="cuda", requires_grad=True)
        F.rms_norm(x * 1, (512,), torch.ones(512, device="cuda", requires_grad=True)).square().sum().backward()
        torch.optim.SGD([x], 0.1).step()

    kept = 2 * 2048 * 512 * 4 + 2048 * 4  # what is normalised, the result, which `square` keeps, and the factors
    assert kept <= rows_of(torchmedic.predict(step))["activations"] <= kept + 2048 * 512 * 4  # the square itself


def test_autocast_follows_the_rules_of_cuda() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[torch.dtype] = []

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.zeros(32, 256, device="cuda"))
            loss = F.softmax(out, -1).sum()
        seen.extend([out.dtype, loss.dtype])
        loss.backward()
        optimizer.step()

    torchmedic.predict(step)
    assert seen[:2] == [torch.float16, torch.float32]


def test_checkpoints_are_followed() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6))
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)

    def step(checkpointed: bool) -> None:
        x = torch.zeros(4096, 512, device="cuda")
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, less = (torchmedic.predict(lambda flag=flag: step(flag)) for flag in (False, True))  # type: ignore[misc]
    hidden = 6 * 2 * 4096 * 2048 * 4  # what is not kept any more: two tensors in each layer
    assert plain.need.allocated - less.need.allocated >= 0.6 * hidden


def test_a_step_without_an_update_is_an_error_in_one_line() -> None:
    with pytest.raises(TorchmedicError, match="no training step"):
        torchmedic.predict(lambda: torch.zeros(2))

    def broken() -> None:
        nn.Linear(2, 3)(torch.zeros(1, 5))

    with pytest.raises(TorchmedicError, match=r"RuntimeError at .*test_predict\.py:\d+: "):
        torchmedic.predict(broken)


def test_a_build_that_cannot_pretend_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_ensureCUDADeviceGuardSet")  # as in torch 2.6
    with pytest.raises(TorchmedicError, match="a newer version is needed"):
        torchmedic.predict(training(lambda params: torch.optim.SGD(params, 0.1))[2])
