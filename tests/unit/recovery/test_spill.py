"""Saved tensors out of memory: copied, brought back ahead of time, or computed again; the gradients stay the same."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchmedic.recovery import backward_room, early_spill, pinned_copies
from torchmedic.recovery.backward_room import BackwardRoom
from torchmedic.recovery.cross_entropy import CrossEntropyInParts
from torchmedic.recovery.early_spill import EarlySpill
from torchmedic.recovery.optimizer_memory import OptimizerMemory
from torchmedic.recovery.parking import ParkingSpace
from torchmedic.recovery.pinned_copies import PinnedCopies
from torchmedic.recovery.places import Place
from torchmedic.recovery.recipes import Recipes
from torchmedic.recovery.room import RoomMaker
from torchmedic.recovery.saved_tensors import SavedTensors

EVERYTHING = 1 << 60


class Stream:
    """A stream that does its work at once and counts who waits for it."""

    def __init__(self, *_: object) -> None:
        self.waits = 0

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: object) -> None:
        self.waits += 1

    def record_event(self) -> object:
        return object()


class DeviceSpace(ParkingSpace):
    """Treats the host as a device."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.only = PinnedCopies(torch.device("cpu"))

    def copies(self, device: torch.device) -> PinnedCopies | None:
        return self.only

    def catch_up(self) -> None:
        self.only.catch_up()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Stream:
    computation = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: computation)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return computation


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=bias) for bias in (False, True))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second(self.relu(self.norms[0](self.first(x))))
        return self.relu(self.norms[1](inner) + x)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    blocks = (Residual(8) for _ in range(5))
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.MaxPool2d(2)), torch.randn(4, 3, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True, layer_norm_eps=1e-6)
    return nn.TransformerEncoder(layer, 3), torch.randn(4, 16, 32)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = [each for _ in range(4) for each in (nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*layers), torch.randn(4, 16, 32)


MODELS: list[Callable[[], tuple[nn.Module, torch.Tensor]]] = [convolutions, transformer, perceptron]


def results(model: nn.Module, data: torch.Tensor, way: Any, *, half: bool) -> list[torch.Tensor]:
    """The gradients, buffers and random numbers after one step."""
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), way:
        loss = model(data).float().square().mean()
    loss.backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    found += [*(each.clone() for each in model.buffers()), torch.get_rng_state()]
    model.load_state_dict(state)
    return found


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are dropped; every recipe counts as cheap."""
    sizes: list[int] = []
    original = Place.drop

    def drop(place: Place, recipe: Any) -> None:
        sizes.append(place.nbytes)
        original(place, recipe)

    monkeypatch.setattr(Place, "drop", drop)
    monkeypatch.setattr(early_spill, "_FILE_SECONDS_PER_BYTE", 1.0)
    return sizes


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_computed_again(make: Any, half: bool, dropped: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = make()
    wanted = results(model, data, contextlib.nullcontext(), half=half)
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), EVERYTHING)
    for step in range(4):  # two to learn the prices, two by the plan
        spill.next_step()
        if step == 2:
            dropped.clear()
        found = results(model, data, spill.active(), half=half)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert sum(dropped) > spill.spilled // 4


@pytest.mark.parametrize("make", MODELS)
def test_copied_and_brought_back(make: Any, device: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = make()
    wanted = results(model, data, contextlib.nullcontext(), half=False)
    monkeypatch.setattr(pinned_copies, "_MAX_BEHIND_BYTES", 1 << 15)
    space = DeviceSpace(tmp_path)
    space.only.seconds_per_byte = 1e-30  # no recipe is cheaper
    space.only._max_ahead_bytes = 1 << 15
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), EVERYTHING)
    for _ in range(4):
        spill.next_step()
        found = results(model, data, spill.active(), half=False)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    gc.collect()
    copies = space.only
    assert spill.spilled > 1 << 16
    assert device.waits
    assert (copies._used_bytes, copies.ahead_bytes) == (0, 0)
    # Buffers are used again: those of one step are enough for all steps.
    assert copies._free_bytes <= spill.spilled


def test_a_part_of_the_step_stays(device: Stream, dropped: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = transformer()
    space = DeviceSpace(tmp_path)
    space.only.seconds_per_byte = 1.0  # every recipe is cheap
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), 1 << 17)
    for _ in range(4):
        spill.next_step()
        dropped.clear()
        results(model, data, spill.active(), half=False)
    # What is cheap to compute goes first, so that few bytes are copied.
    assert spill.spilled >= 1 << 17
    assert sum(dropped) >= spill.spilled // 2
    assert spill.spilled - sum(dropped) < 1 << 17


def test_a_changed_tensor_is_still_an_error(tmp_path: Path) -> None:
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), 0)
    x = torch.randn(64, 64, requires_grad=True)
    with spill.active():
        middle = x.exp()
        loss = middle.sum()
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_without_backward_is_freed(tmp_path: Path) -> None:
    """A node that saves its own result must not keep itself alive."""
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), 0)
    with spill.active():
        result = torch.randn(64, 64, requires_grad=True).exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    gc.collect()
    assert storage.expired()


def test_a_kept_graph(dropped: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = perceptron()
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    with EarlySpill(saved, space, Recipes(saved), EVERYTHING).active():
        torch.manual_seed(1)
        loss = model(data).square().mean()
    saved.backward.keeps_graph = True
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    torch.manual_seed(1)
    plain = torch.autograd.grad(model(data).square().mean(), list(model.parameters()))
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, plain, strict=True))
    assert dropped


class Memory:
    """So many bytes are in use, of so many."""

    def __init__(self, in_use: int, limit: int) -> None:
        self.in_use, self.limit = in_use, limit

    def __call__(self, device: torch.device) -> tuple[int, int]:
        return self.in_use, self.limit


def test_room_before_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    room = BackwardRoom(RoomMaker(saved, OptimizerMemory(space, lambda: None)), saved, CrossEntropyInParts())
    model, data = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.randn(256, 64)  # 64 KiB each
    wanted = torch.autograd.grad(model(data).square().mean(), list(model.parameters()))

    monkeypatch.setattr(backward_room, "in_use_and_limit", Memory(1 << 20, 8 << 20))
    loss = model(data).square().mean()
    assert room.make([loss], model.parameters()) == 0
    # Two gradients of the two largest tensors, and a gradient of 16 KiB, in 128 KiB.
    monkeypatch.setattr(backward_room, "in_use_and_limit", Memory(1 << 20, (1 << 20) + (1 << 17)))
    parked = room.make([loss], model.parameters())
    assert 1 << 17 <= parked <= 5 << 16
    own = data.untyped_storage()._cdata  # which the test holds, so that nothing is won by parking it
    oldest = [each for each in saved._places.values() if each.nbytes == 1 << 16 and each.key != own]
    oldest.sort(key=lambda each: each.sequence)
    assert len(oldest) == 8
    assert [each.is_out for each in oldest] == sorted((each.is_out for each in oldest), reverse=True)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    room.succeeded()
    # A pass that begins with as little in use is not looked at again.
    monkeypatch.setattr(backward_room, "in_use_and_limit", Memory((1 << 20) - parked, (1 << 20) + (1 << 17)))
    monkeypatch.setattr(saved, "sizes", pytest.fail)
    assert room.make([model(data).square().mean()], model.parameters()) == 0


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def candidates(*prices: tuple[float | None, float]) -> list[early_spill._Candidate]:
    """Tensors of one KiB, each with the seconds of its recipe and of its copy."""
    return [early_spill._Candidate(number, 1024, *each) for number, each in enumerate(prices, 1)]


def test_the_cheapest_tensors_go() -> None:
    found = candidates((None, 1.0), (0.1, 1.0), (0.8, 1.0), (None, 1.0), (0.1, 1.0))
    plans = [early_spill._Plan(found, 1024 * budget, hidden_seconds=1.0) for budget in range(6)]
    assert [sorted(each.dropped) for each in plans] == [[], [2], [2, 5], [2, 5], [2, 3, 5], [2, 3, 5]]
    assert [sorted(each.copied) for each in plans] == [[], [], [], [1], [1], [1, 4]]
    # Hooks are on as long as a tensor may go, or a copy may have to be brought back soon.
    assert [each.last for each in plans] == [0, 2, 5, 25, 25, 28]
    plan = early_spill._Plan(found, 1024, 0.0, {6: 2, 7: 3})
    assert plan.involved == {2, 6}
    assert [each // 1024 for each in plan.freed] == [4, 3, 3, 2, 1, 0, 0]


def test_another_step_than_the_planned_one(dropped: list[int], tmp_path: Path) -> None:
    """A batch of another size is learned anew, and its gradients are right."""
    torch.manual_seed(0)
    model, data = perceptron()
    space = ParkingSpace(tmp_path)
    saved = SavedTensors(space)
    spill = EarlySpill(saved, space, Recipes(saved), EVERYTHING)
    for rows in (4, 4, 4, 2, 2, 2, 2, 4):
        wanted = results(model, data[:rows], contextlib.nullcontext(), half=False)
        spill.next_step()
        found = results(model, data[:rows], spill.active(), half=False)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
