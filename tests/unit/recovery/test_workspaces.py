"""A refused workspace of a convolution: an exception in a forward pass, a line in the report after a backward pass."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import torchmedic
from torchmedic.observe.memory import cuda_refusals
from torchmedic.recovery import guard, workspaces
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.recovery.workspaces import CONVOLUTIONS, Workspaces

WORKSPACE = 1 << 20
plain = torch.conv2d


class Allocator:
    """Refuses memory as the allocator of a device does: it calls its observer, and then raises."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals

    def workspace(self, *_: object) -> None:
        if self.left:
            self.left -= 1
            cuda_refusals._refused(0, WORKSPACE, 1 << 30, 0)
            raise torch.OutOfMemoryError("CUDA out of memory.")


def convolution(allocator: Allocator, *args: Any) -> torch.Tensor:
    """A convolution whose kernel without workspace has another result."""
    try:
        allocator.workspace()
    except torch.OutOfMemoryError as error:
        if "Tried to allocate" in str(error):  # by our observer: torch knows nothing of it
            raise
        return plain(*args) + 1
    return plain(*args)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8), torch.nn.Parameter(torch.randn(4, 3, 3, 3))


@pytest.mark.parametrize(("refusals", "means"), [(1, "retry"), (2, "activations"), (1000, "kernel")])
def test_in_a_forward_pass(
    refusals: int, means: str, data: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(refusals)

    def conv2d(*args: Any) -> torch.Tensor:
        return (
            torch.overrides.handle_torch_function(conv2d, args, *args) if has_mode() else convolution(allocator, *args)
        )

    def has_mode() -> bool:
        return bool(torch._C._len_torch_function_stack())

    monkeypatch.setattr(guard, "CONVOLUTIONS", CONVOLUTIONS | {conv2d})
    with torchmedic.recover() as happened:
        torch.optim.SGD([data[1]], lr=0.1)
        saved = torch.randn(64, 64, requires_grad=True).exp().exp()  # something to park
        found = conv2d(*data)
    assert [getattr(each, "means", "") for each in happened] == [means]
    assert torch.equal(found, plain(*data) + (means == "kernel"))
    assert ("up to rounding" in happened.lines[0]) == (means == "kernel")
    assert saved.grad_fn is not None


def test_no_room_for_the_result(data: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script gets the words of torch, not those of the listener."""

    def conv2d(*args: Any) -> torch.Tensor:
        if torch._C._len_torch_function_stack():
            return torch.overrides.handle_torch_function(conv2d, args, *args)
        Allocator(1).workspace()
        raise AssertionError

    monkeypatch.setattr(guard, "CONVOLUTIONS", CONVOLUTIONS | {conv2d})
    with torchmedic.recover() as happened:
        torch.optim.SGD([data[1]], lr=0.1)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            conv2d(*data)
    assert str(raised.value) == "CUDA out of memory."
    assert raised.value.__context__ is None
    assert "no memory could be freed" in happened.lines[0]


def test_in_a_backward_pass(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    allocator = Allocator(1)

    def workspace(*_: object) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # torch takes another kernel
            allocator.workspace()

    with torchmedic.recover() as happened:
        optimizer = torch.optim.SGD([data[1]], lr=0.1)
        for _ in range(2):
            result = torch.conv2d(*data)
            assert result.grad_fn is not None
            result.grad_fn.register_prehook(workspace)
            result.sum().backward()
            optimizer.step()
    assert [(each.phase, getattr(each, "means", "")) for each in happened] == [("backward", "kernel")]


@pytest.mark.parametrize("tries", [1, 3])
def test_a_convolution_is_tried_before_its_gradients(
    tries: int, data: tuple[torch.Tensor, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the workspace is made before the node runs, and the gradients are the same."""
    tried, made = [], []
    found = Workspaces()

    def convolution(function: Any, *args: Any) -> Any:
        tried.append([each.shape for each in function(*args) if each is not None])
        if len(tried) < tries:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def make_room(nbytes: int) -> bool:
        made.append(nbytes)
        return True

    monkeypatch.setattr(workspaces, "_DEVICES", {"cpu"})
    monkeypatch.setattr(found, "convolution", convolution)
    x, weight = data
    x = x.requires_grad_().repeat(8, 1, 1, 1)
    wanted = torch.autograd.grad(torch.conv2d(x, weight).sin().sum(), [x, weight], retain_graph=True)
    result = torch.conv2d(x, weight)
    loss = result.sin().sum()
    found.try_before_use([loss.grad_fn, result.grad_fn], SavedTensors(ParkingSpace(tmp_path)), make_room)
    gradients = torch.autograd.grad(loss, [x, weight])
    assert all(torch.equal(one, other) for one, other in zip(gradients, wanted, strict=True))
    assert tried == [[x.shape, weight.shape]] * tries
    assert made == [x.nbytes] * (tries - 1)
