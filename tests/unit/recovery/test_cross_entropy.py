"""Cross entropy in parts gives the loss and the gradient of torch, bit for bit, with less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchmedic.recovery import cross_entropy
from torchmedic.recovery.cross_entropy import CrossEntropyInParts

ROWS = 2500  # more than 32 parts of 64 rows


@pytest.fixture(autouse=True)
def small_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_MIN_BYTES", 1)


def in_parts(parts: CrossEntropyInParts) -> Any:
    return lambda logits, target, **options: parts.result((logits, target), options)


def loss_and_gradient(
    call: Any, logits: torch.Tensor, target: torch.Tensor, *, half: bool, **options: Any
) -> tuple[torch.Tensor, ...]:
    source = logits.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = call(source * 1, target, **options)
    (loss * 1.5).sum().backward()
    assert source.grad is not None
    return loss.detach(), source.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("may_overwrite", [False, True])
def test_same_bits(dtype: torch.dtype, half: bool, may_overwrite: bool) -> None:
    torch.manual_seed(0)
    for reduction in ("mean", "sum", "none"):
        for ignored in (-100, 3):
            logits, target = torch.randn(ROWS, 11, dtype=dtype), torch.randint(0, 11, (ROWS,))
            target[7] = ignored
            parts = CrossEntropyInParts()
            parts.may_overwrite = may_overwrite
            options = {"ignore_index": ignored, "reduction": reduction}
            wanted = loss_and_gradient(F.cross_entropy, logits, target, half=half, **options)
            found = loss_and_gradient(in_parts(parts), logits, target, half=half, **options)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


@pytest.mark.parametrize("is_held", [False, True])
def test_logits_are_overwritten_only_if_nobody_else_has_them(is_held: bool) -> None:
    logits = torch.randn(ROWS, 11, requires_grad=True) * 1
    before, address = logits.detach().clone(), logits.data_ptr()
    addresses: list[int] = []
    logits.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    parts = CrossEntropyInParts()
    parts.may_overwrite = True
    loss = parts.result((logits, torch.randint(0, 11, (ROWS,))), {})
    assert loss is not None
    if is_held:
        loss.backward()
        assert torch.equal(logits, before)
    else:
        del logits
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert (addresses == [address]) is not is_held


def test_changed_logits_are_an_error() -> None:
    logits = torch.randn(ROWS, 11, requires_grad=True) * 1
    loss = CrossEntropyInParts().result((logits, torch.zeros(ROWS, dtype=torch.int64)), {})
    assert loss is not None
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_not_taken_apart() -> None:
    logits, target = torch.randn(ROWS, 11, requires_grad=True), torch.randint(0, 11, (ROWS,))
    parts = CrossEntropyInParts()
    assert parts.result((logits, target), {"weight": torch.ones(11)}) is None
    assert parts.result((logits, target), {"label_smoothing": 0.1}) is None
    assert parts.result((logits, torch.softmax(logits, 1).detach()), {}) is None
    assert parts.result((logits.detach(), target), {}) is None
    with torch.no_grad():
        assert parts.result((logits, target), {}) is None
    assert repr(parts.result((logits, target), {})).endswith("grad_fn=<NllLossBackward0>)")


def test_other_bits_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda *args: original(*args) * (1 + 1e-6))
    logits, target = torch.randn(ROWS, 11, requires_grad=True), torch.randint(0, 11, (ROWS,))
    assert CrossEntropyInParts().result((logits, target), {}) is None
