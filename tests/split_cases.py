"""Training loops whose largest results never fit, so that only calls of modules in parts of the batch can go on."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from recovery_cases import WORDS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchmedic

ROWS, WIDTH, INNER = 64, 32, 512
MOST = WIDTH * INNER  # elements: a weight fits, the inner results of half the rows fit, those of all do not


class NothingLarge(TorchDispatchMode):
    """Refuses memory for large results, in the whole step or in backward passes only."""

    def __init__(self, most: int, *, only_backward: bool = False) -> None:
        super().__init__()
        self._most = most
        self._only_backward = only_backward
        self.refused = ctypes.c_long(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_exempt = self._only_backward and torch._C._current_autograd_node() is None
        if self._most and not is_exempt and not func._schema.is_mutable and func.namespace == "aten":
            given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and each.numel() > self._most and _storage(each) not in given:
                    self.refused.value += 1
                    raise torch.OutOfMemoryError(WORDS)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Wide(nn.Module):
    """The inner results are too large."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, INNER), *inner, nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + cast(torch.Tensor, self.layers(x))


class Model(nn.Module):
    """Counts its calls: its own body must run once for each step."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cast(torch.Tensor, self.last(self.body(self.first(x))))


class Counting(Wide):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Keeping(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return super().forward(x)


class Centred(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 0.1 * x.mean(0))


def hooked() -> nn.Module:
    body = Wide()
    body.layers[0].register_forward_hook(lambda *_: None)
    return body


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, INNER, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mean(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def total(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (out - x[..., :8]).square().sum() / 100


def contrastive(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(5 * z @ z.t(), torch.arange(len(z)).roll(1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001, eps=1e-4)


Found = tuple[list[float], list[torch.Tensor], list[int]]


def loop(
    fault: TorchDispatchMode,
    body: Callable[[], nn.Module] = Wide,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mean,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    shape: tuple[int, ...] = (ROWS, WIDTH),
    parts: int = 1,
    half: bool = False,
) -> Found:
    torch.manual_seed(0)
    net = Model(body())
    optimizer = make(net.parameters())
    seen: list[int] = []
    next(net.parameters()).register_post_accumulate_grad_hook(lambda _: seen.append(0))
    net.register_forward_hook(lambda module, args, result: seen.append(len(result)))
    losses = []
    with fault:
        for step in range(3 * parts):
            x = torch.randn(shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = loss_of(net(x).float(), x) / parts
            loss.backward()
            losses.append(loss.item())
            if step % parts == parts - 1:
                optimizer.step()
                optimizer.zero_grad()
    return losses, [each.detach() for each in net.parameters()], [net.calls, *seen]


def gpt2(fault: TorchDispatchMode) -> Found:
    """The model computes its own loss, so that only its body can be called in parts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "n_inner": INNER, "n_positions": 4}
    tokens: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = sgd(net.parameters())
    losses = []
    with fault:
        for _ in range(2):
            tokens_of_batch = torch.randint(0, 50, (16, 4))
            loss = net(input_ids=tokens_of_batch, labels=tokens_of_batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [each.detach() for each in net.parameters()], []


def line_search(fault: TorchDispatchMode) -> Found:
    torch.manual_seed(0)
    net = Wide()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    x = torch.randn(ROWS, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return cast(torch.Tensor, loss)

    with fault:
        return [float(optimizer.step(closure))], [], []  # type: ignore[arg-type]


LOOPS: dict[str, Callable[[TorchDispatchMode], Found]] = {
    "mean": lambda fault: loop(fault, make=adam),
    "sum": lambda fault: loop(fault, loss_of=total),
    "contrastive": lambda fault: loop(fault, loss_of=contrastive),
    "accumulation": lambda fault: loop(fault, parts=2),
    "autocast": lambda fault: loop(fault, half=True),
    "encoder": lambda fault: loop(fault, encoder, shape=(16, 4, WIDTH)),
    "gpt2": gpt2,
    "dropout": lambda fault: loop(fault, lambda: Wide(nn.Dropout(0.1))),
    "batch_norm": lambda fault: loop(fault, lambda: Wide(nn.BatchNorm1d(INNER))),
    "counting": lambda fault: loop(fault, Counting),
    "keeping": lambda fault: loop(fault, Keeping),
    "centred": lambda fault: loop(fault, Centred),
    "hooked": lambda fault: loop(fault, hooked),
    "line_search": line_search,
}


def report(name: str, level: Any, only_backward: bool) -> None:
    """Run a loop without and with the faults, and print what was different and what happened."""
    torch.set_num_threads(1)
    wanted = LOOPS[name](NothingLarge(0))
    fault = NothingLarge(MOST, only_backward=only_backward)
    with torchmedic.recover(level) as happened:
        try:
            found = LOOPS[name](fault)
        except torch.OutOfMemoryError:
            found = None
    differences = []
    if found is not None:
        differences = [abs(one - other) / abs(one) for one, other in zip(wanted[0], found[0], strict=True)]
        differences += [
            float((one - other).norm() / one.norm()) for one, other in zip(wanted[1], found[1], strict=True)
        ]
    print(
        json.dumps(
            {
                "survived": found is not None,
                "refused": fault.refused.value,
                "difference": max(differences, default=0.0),
                "seen_as_before": found is not None and found[2] == wanted[2],
                "how": [f"{each.phase} {getattr(each, 'means', 'refused')}" for each in happened],
                "calls": sorted({getattr(each, "call", "") for each in happened}),
                "lines": happened.lines,
            }
        )
    )
