"""A lost device is answered from the CPU: every way to name it, every tensor that was on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.replay.shadow.cpu_shadow import Shadow
from torchmedic.replay.shadow.fake_cuda import shaded, standing_in
from torchmedic.replay.shadow.invented_values import Inventor, is_big_product, pretend


@pytest.fixture
def shadow() -> Iterator[Shadow]:
    shadow = Shadow()
    with shaded(shadow, StepNotes()):
        yield shadow


def lost(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # past the shadow
        return torch.empty(*shape, dtype=dtype, device="meta")


host = torch.arange(6.0)


def _in_a_block() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(2)


def _by_default() -> torch.Tensor:
    torch.set_default_device("cuda")
    try:
        return torch.zeros(2)
    finally:
        torch.set_default_device(None)


REQUESTS: dict[str, Callable[[], Any]] = {
    "factory": lambda: torch.zeros(2, device="cuda"),
    "factory with an ordinal": lambda: torch.randn(2, device="cuda:1"),
    "factory with a number": lambda: torch.ones(2, device=0),
    "factory with a device": lambda: torch.arange(3, device=torch.device("cuda", 0)),
    "from data": lambda: torch.tensor([1, 2], device="cuda"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="cuda"),
    "legacy class": lambda: torch.cuda.FloatTensor([1.0, 2.0]),
    "new": lambda: host.new_zeros(2, device="cuda"),
    "like": lambda: torch.zeros_like(host, device="cuda"),
    "cuda": host.cuda,
    "cuda with a number": lambda: host.cuda(1, non_blocking=True),
    "to": lambda: host.to("cuda"),
    "to with dtype": lambda: host.to("cuda", torch.float16, non_blocking=True),
    "to with a keyword": lambda: host.to(device="cuda", dtype=torch.bfloat16, copy=True),
    "to a number": lambda: host.to(0),
    "to where another is": lambda: host.to(lost(1)),
    "pinned": host.pin_memory,
    "made pinned": lambda: torch.empty(3, pin_memory=True),
    "generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3)),
    "in a block": _in_a_block,
    "default device": _by_default,
    "a module": lambda: nn.Linear(2, 2).to("cuda").weight,
    "a module made there": lambda: nn.Linear(2, 2, device="cuda").weight,
}


@pytest.mark.parametrize("ask", REQUESTS.values(), ids=REQUESTS)
def test_requests_for_the_device_are_answered_on_the_cpu(shadow: Shadow, ask: Callable[[], Any]) -> None:
    assert ask().device == torch.device("cpu")


def test_a_move_keeps_the_dtype_that_was_asked_for(shadow: Shadow) -> None:
    assert host.to("cuda", torch.float16).dtype is torch.float16
    assert host.to(lost(1, dtype=torch.float64)).dtype is torch.float64
    assert host.to(0).dtype is host.dtype


def test_what_is_moved_is_a_copy(shadow: Shadow) -> None:
    moved = host.cuda()
    moved += 1

    assert torch.equal(host, torch.arange(6.0))


def test_streams_events_and_seeds_do_nothing(shadow: Shadow) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        event.record()
        torch.cuda.current_stream().wait_stream(stream)
        host.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    torch.cuda.manual_seed_all(1)

    assert event.query()
    assert event.elapsed_time(event) == 0.0
    assert torch.cuda.current_device() == 0


def test_autocast_for_the_device_casts_on_the_cpu(shadow: Shadow) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.randn(4, 4, device="cuda") @ torch.randn(4, 4, device="cuda")).dtype is torch.bfloat16


def test_nothing_is_left_behind() -> None:
    before = (torch.cuda.Stream, torch.cuda.synchronize, torch.Generator, torch.autocast.__init__)
    with shaded(Shadow(), StepNotes()):
        assert torch.cuda.Stream is not before[0]
    assert (torch.cuda.Stream, torch.cuda.synchronize, torch.Generator, torch.autocast.__init__) == before
    assert "record_stream" not in vars(torch.Tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.table = torch.zeros(3, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, _ = self.rnn(self.embedding(ids) + self.table)
        return self.head(hidden).masked_fill(~self.mask[:, None], 0.0)


def test_a_whole_model_runs_forward_and_back() -> None:
    model = Tied().to("meta")
    model.head.weight = model.embedding.weight
    model.table = model.table.to("meta")
    shadow = Shadow()
    with standing_in(shadow), shaded(shadow, StepNotes()):
        loss = model(torch.tensor([[1, 2, 10]])).square().mean()
        loss.backward()
        weight = model.embedding.weight
        assert weight.device.type == "cpu"
        assert weight is model.head.weight
        assert weight.grad is not None
    assert model.embedding.weight.device.type == "meta"
    assert model.embedding.weight is model.head.weight
    assert model.embedding.weight.grad is None


def test_an_index_from_the_host_is_checked(shadow: Shadow) -> None:
    weight = lost(10, 4)
    with pytest.raises(IndexError) as raised:
        F.embedding(torch.tensor([10]), weight)

    failed = shadow.failed(raised.value)
    assert failed is not None
    assert failed.op == "embedding"
    assert not failed.index_invented
    assert shadow.failed(ValueError()) is None


def test_what_depends_on_invented_values_is_known(shadow: Shadow) -> None:
    weight, ids = lost(10, 4), torch.tensor([1, 2])
    hidden = F.embedding(ids, weight)
    best = hidden.argmax(-1)

    assert shadow.is_invented(hidden)
    assert shadow.is_invented(best)
    assert not shadow.is_invented(ids.cuda() + 1)
    assert shadow.is_invented(torch.randint(0, 5, (3,), device="cuda"))


def test_host_originals_take_the_place_of_lost_ones(shadow: Shadow) -> None:
    moved, original = lost(3, dtype=torch.int64), torch.tensor([1, 2, 9])
    shadow.begin({id(moved): original})

    assert torch.equal(moved + 0, original)
    assert not shadow.is_invented(moved + 0)


def test_a_custom_function_is_tied_to_stand_ins(shadow: Shadow) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x, w = ctx.saved_tensors
            return gradients[0] * w, (gradients[0] * x).sum_to_size(w.shape)

    weight = nn.Parameter(lost(3))
    result = Twice.apply(torch.ones(2, 3), weight)
    result.sum().backward()

    assert shadow.is_invented(result)
    assert torch.equal(shadow.stand_in(weight).grad, torch.full((3,), 2.0))


def test_code_that_insists_on_the_device_is_told_what_it_wants_to_hear(shadow: Shadow) -> None:
    assert not host.cuda().is_cuda
    shadow.claims_device = True

    assert host.cuda().is_cuda
    assert host.device.type == "cuda"
    assert torch.zeros(2, device=host.device).sum() == 0


def test_writes_to_a_big_stand_in_go_to_a_copy(shadow: Shadow) -> None:
    big = lost(300, 300, 3)

    assert F.relu(big * 1, inplace=True).min() >= 0
    assert big.clamp_(min=5).min() == 5


PRODUCTS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "linear": lambda: (F.linear, (torch.randn(7, 5), torch.randn(3, 5), torch.randn(3))),
    "matmul": lambda: (torch.matmul, (torch.randn(2, 4, 5), torch.randn(5, 6))),
    "conv": lambda: (F.conv2d, (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))),
    "attention": lambda: (F.scaled_dot_product_attention, tuple(torch.randn(2, 4, 6, 8) for _ in range(3))),
}


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_a_pretended_product_is_like_the_real_one(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    function, given = make()
    given = tuple(tensor.requires_grad_() for tensor in given)
    real = function(*given)
    made = pretend(function, given, {}, list(given), Inventor().noise)
    made.sum().backward()

    assert (made.shape, made.dtype) == (real.shape, real.dtype)
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in given)


def test_only_long_products_are_pretended() -> None:
    assert not is_big_product(F.linear, [torch.empty(64, 64), torch.empty(64, 64)])
    assert is_big_product(F.linear, [lost(8192, 4096), lost(4096, 4096)])
    assert not is_big_product(F.cross_entropy, [lost(8192, 4096), lost(8192)])
