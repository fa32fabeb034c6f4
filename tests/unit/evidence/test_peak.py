"""The peak of a step that is predicted on fake tensors is the one that it has, and predicting it leaves no trace."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from predicted_peak import peak_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from torchmedic.evidence.memory.fake.fake_step import device_left_alone
from torchmedic.evidence.memory.fake.peak import LiveBytes, highest, rounded
from torchmedic.evidence.memory.fake.rows import Rows, fewer, rows_in
from torchmedic.evidence.memory.fake.whole_step import Change, NotRows, WholeStep
from torchmedic.observe.step.batches import Given
from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.replay.fake.births import between
from torchmedic.replay.fake.recurrent import kept_bytes
from torchmedic.replay.step.step import from_traceback
from torchmedic.source import user_code as frame_kinds

Take = Callable[[nn.Module, Any, torch.Tensor, torch.Tensor], None]


class RealBytes(TorchDispatchMode):
    """Counts what a step really makes, operation by operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.live.born(each)
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.mix(x).split(width, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.head(h).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(300, 16), nn.Linear(32, 300)
        self.rnn = nn.LSTM(16, 32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.words(x))[0]).transpose(1, 2)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.up, self.out = nn.Conv2d(32, 16, 3, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = F.silu(self.down(x))
        h = F.silu(self.middle(F.avg_pool2d(kept, 2)))
        return self.out(F.silu(self.up(torch.cat([F.interpolate(h, scale_factor=2), kept], 1))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.Linear(128, 10))


def cnn() -> nn.Module:
    body = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3))
    return nn.Sequential(*body, nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 300, (4, 32)), torch.randint(0, 300, (4, 32))


def few_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 300, (8, 5)), torch.randint(0, 300, (8, 5))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(256, 32), torch.randint(0, 10, (256,))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4, 16, 16))


def plainly(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def cleared_late(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def in_bfloat16(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(2):
        (F.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, foreach=True)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, Take]] = {
    "mlp": (mlp, adam, rows, plainly),
    "mlp-cleared-late": (mlp, adam, rows, cleared_late),
    "cnn-with-batch-norm": (cnn, momentum, images, plainly),
    "gpt": (Gpt, adam, tokens, plainly),
    "gpt-in-bfloat16": (Gpt, momentum, tokens, in_bfloat16),
    "gpt-accumulated": (Gpt, momentum, tokens, accumulated),
    "gpt-checkpointed": (lambda: Gpt(checkpointed=True), adam, tokens, plainly),
    "lstm": (Lstm, momentum, few_tokens, plainly),
    "u-net": (UNet, adam, pictures, plainly),
}


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Of oneDNN's LSTM fakes do not know what it keeps."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_the_real_one(name: str) -> None:
    build, optimizer_of, draw, take = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_of(model.parameters())
    x, y = draw()
    for _ in range(2 if build in (mlp, cnn) else 1):  # the first step makes the state of the optimizer
        before = traces(model, optimizer)
        predicted = peak_of(lambda: take(model, optimizer, x, y), modules=[model], optimizers=[optimizer])
        assert same(before, traces(model, optimizer))
        with RealBytes() as real:
            take(model, optimizer, x, y)
        assert max(predicted.values()) == pytest.approx(max(real.live.by_phase.values()), rel=0.02)
        assert set(predicted) == {"forward", "backward", "optimizer"}


def traces(model: nn.Module, optimizer: Any) -> list[Any]:
    """Whatever a step changes."""
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*model.state_dict().values(), *state, *(each.grad for each in model.parameters()), torch.get_rng_state()]
    assert not any(isinstance(each, FakeTensor) for each in tensors)
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in tensors]


def same(one: list[Any], two: list[Any]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in pairs)


def test_the_profiler_saw_the_same_peak() -> None:
    """By those who count every allocation of the allocator, also inside of an operation."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2048, 64), torch.randint(0, 10, (2048,))
    predicted = peak_of(lambda: plainly(model, optimizer, x, y), modules=[model], optimizers=[optimizer])
    with torch.profiler.profile(profile_memory=True) as profile:
        plainly(model, optimizer, x, y)
    events = profile.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    now = highest = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    assert max(predicted.values()) == pytest.approx(highest, rel=0.03)


STEP = """
import torch
import torch.nn.functional as F
def train(x, y):
    for turn in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if goes_on else loss.detach()).backward()
train(x, y)
"""


def failed_step(folder: Path, **variables: Any) -> tuple[WholeStep, dict[str, Any]]:
    """A step that failed, and would go on if it were run again."""
    path = folder / "train.py"
    path.write_text(STEP)
    linecache.checkcache()
    frame_kinds._known.clear()
    clock = SimpleNamespace(optimizers=[variables["optimizer"]], usual_step=0.0)
    agent = SimpleNamespace(notes=StepNotes(), clock=clock, batches=SimpleNamespace(whole=None))
    namespace = {"__name__": "train", "goes_on": False, **variables}
    with pytest.raises(RuntimeError) as caught:
        exec(compile(STEP, str(path), "exec"), namespace)
    assert caught.tb.tb_next is not None
    step = from_traceback(caught.tb.tb_next, agent)
    namespace["goes_on"] = True
    return WholeStep.on(step.runner, lambda device: True, accumulates=False), namespace


def test_a_failed_step_is_changed_as_its_user_would_change_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randint(0, 300, (8, 32)), torch.randint(0, 300, (8, 32))
    step, _ = failed_step(tmp_path, model=model, optimizer=optimizer, x=x, y=y)
    before = traces(model, optimizer)

    def played(change: Change) -> int:
        ledger = step.count(change, time.monotonic() + 60)
        assert ledger.has_half == bool(change.autocast)
        return max(made for phase, made in ledger.live.by_phase.items() if phase != "optimizer")

    def taken(take: Take, kept: int = 8) -> int:
        found = peak_of(lambda: take(model, optimizer, x[:kept], y[:kept]), modules=[model], optimizers=[optimizer])
        return max(made for phase, made in found.items() if phase != "optimizer")

    gradients = sum(rounded(each.nbytes, "cpu") for each in model.parameters())
    assert 0 <= played(Change()) - taken(plainly) <= gradients  # those of the step before go at once
    assert played(Change(rows=Rows(4, 8))) == taken(plainly, 4)
    assert played(Change(autocast="cpu")) == taken(in_bfloat16)
    fewer_saved = played(Change(checkpointed=tuple(model.blocks)))
    model.checkpointed = True
    assert fewer_saved == pytest.approx(taken(plainly), rel=0.02)
    model.checkpointed = False
    assert same(before, traces(model, optimizer))
    assert "forward" not in vars(model.blocks[0])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
        h: torch.Tensor = self.mix(x)
        return h if edges is None else h.index_add(0, edges[1], h[edges[0]])


def test_the_nodes_of_a_graph_are_not_cut(tmp_path: Path) -> None:
    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 32), torch.zeros(64, dtype=torch.int64)
    step, namespace = failed_step(tmp_path, model=model, optimizer=optimizer, x=x, y=y, net=model)
    step.count(Change(rows=Rows(32, 64)), time.monotonic() + 60)
    namespace["model"] = partial(model, edges=torch.randint(0, 64, (2, 100)))
    step.count(Change(), time.monotonic() + 60)
    with pytest.raises(NotRows):
        step.count(Change(rows=Rows(32, 64)), time.monotonic() + 60)


def test_two_courses_tell_a_third(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(256, 32), torch.randint(0, 10, (256,))
    step, _ = failed_step(tmp_path, model=model, optimizer=optimizer, x=x, y=y)
    whole, half, eighth = (step.count(Change(rows=Rows(kept, 256)), time.monotonic() + 60) for kept in (256, 128, 32))
    assert whole.course is not None
    assert half.course is not None
    told = between(whole.course, half.course, (256 - 32) / 128)
    assert told is not None
    assert highest(told) == pytest.approx(
        max(eighth.live.by_phase[phase] for phase in ("forward", "backward")), rel=0.001
    )
    assert between(whole.course, half.course._replace(events=half.course.events[1:]), 2.0) is None


def test_rows_are_cut_where_they_are_rows() -> None:
    batch: dict[str, Any] = {
        "x": torch.zeros(8, 3),
        "length": torch.tensor(8),
        "names": ["a"] * 8,
        "inner": (torch.zeros(8), 8),
    }
    cut = fewer(batch, Rows(2, 8))
    assert len(cut["x"]) == 2
    assert cut["x"].untyped_storage()._cdata == batch["x"].untyped_storage()._cdata
    assert len(cut["names"]) == 2
    assert len(cut["inner"][0]) == 2
    assert cut["length"] is batch["length"]
    assert len(batch["x"]) == 8
    weight = nn.Parameter(torch.zeros(8, 2))
    assert fewer([weight, torch.zeros(5)], Rows(2, 8))[0] is weight


def test_how_many_rows_there_are_is_said_only_where_it_is_clear() -> None:
    linear, timely = nn.Linear(2, 2), nn.LSTM(2, 2)
    x, y = torch.zeros(8, 3), torch.zeros(8)
    called = [Given(torch.Size([8, 3]), True)]
    assert rows_in([x, y], list(range(8)), called, [linear]) == 8
    assert rows_in([x.t(), y[:3]], list(range(8)), called, [linear]) is None  # stacked along another dimension
    assert rows_in([x, torch.zeros(5)], [], called, [linear]) is None
    assert rows_in([], [], called, [linear]) == 8
    assert rows_in([], [], called, [timely]) is None
    assert rows_in([], [], [Given(torch.Size([8]), True)], [linear]) is None
    assert rows_in([x[:1]], [3], called, [linear]) is None


def test_a_recurrent_layer_of_cudnn_keeps_its_reserve_until_backward() -> None:
    rnn = nn.LSTM(16, 32, 2, batch_first=True)
    x, state = torch.randn(4, 10, 16, requires_grad=True), torch.zeros(2, 4, 32)
    weights = list(rnn.parameters())

    def step() -> None:
        options: Any = (2, 32, 0, 2, True, 0.0, True, False, [], None)
        torch.ops.aten._cudnn_rnn(x, weights, 4, None, state, state, *options)[0].sum().backward()
        assert all(each.grad is not None and each.grad.shape == each.shape for each in [x, *weights])

    peak = peak_of(step, modules=[rnn])
    assert kept_bytes(x, 2, 32, 2, False) == 4 * 10 * 32 * 11 * 4
    assert peak["forward"] > kept_bytes(x, 2, 32, 2, False)
    x.grad = None


def test_addresses_of_fakes_raise_no_warning() -> None:
    """cuDNN asks for the addresses of weights; warnings are errors in this suite."""
    with FakeTensorMode(), pytest.warns(UserWarning, match="data pointer"):
        torch.empty(3).data_ptr()
    with device_left_alone(), FakeTensorMode():
        torch.empty(3).data_ptr()
