"""Training loops for the tests of recovery, and an out-of-memory at any operation of theirs.

Each loop returns everything that a recovery must not change: losses, weights, buffers, optimizer state, random numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchmedic

WORDS = "CUDA out of memory. Tried to allocate 64.00 KiB."


class OutOfMemory(TorchDispatchMode):
    """Counts the operations of a run; from one of them on, so many operations in a row run out of memory.

    With `late`, an operation that writes to none of its arguments fails after it has done its work, as one does whose
    last allocation is refused. (Batch norm writes to its statistics, after its last allocation.) The counters are no
    Python objects: a replay would put those back.
    """

    def __init__(self, at: int = 0, times: int = 1, *, late: bool = False) -> None:
        super().__init__()
        self._at = at
        self._late = late
        self.count = ctypes.c_long(0)
        self._left = ctypes.c_long(times if at else 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        self.count.value += 1
        if self._left.value and self.count.value >= self._at:
            self._left.value -= 1
            if self._late and not func._schema.is_mutable and "batch_norm" not in func.__name__:
                func(*args, **(kwargs or {}))
            raise torch.OutOfMemoryError(WORDS)
        return func(*args, **(kwargs or {}))

    @property
    def has_fired(self) -> bool:
        return not self._left.value


Outcome = list[Any]
Loop = Callable[[OutOfMemory], Outcome]


def outcome(losses: list[float], modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Outcome:
    tensors = [each.detach().clone() for module in modules for each in module.state_dict().values()]
    for optimizer in optimizers:
        for values in optimizer.state.values():
            tensors += [
                torch.as_tensor(each).clone() for each in values.values() if isinstance(each, torch.Tensor | float)
            ]
    return [losses, *tensors, torch.get_rng_state()]


def same(one: Outcome, other: Outcome, *, is_rounded: bool) -> bool:
    if is_rounded:
        pairs = [(torch.tensor(one[0]), torch.tensor(other[0])), *zip(one[1:], other[1:], strict=True)]
        return all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5) for a, b in pairs)
    return (
        len(one) == len(other)
        and one[0] == other[0]
        and all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))
    )


def batches(count: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def momentum(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)
    losses = []
    with fault:
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return outcome(losses, [net], [optimizer])


def adam(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = small()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    with fault:
        for x, y in batches(3):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return outcome(losses, [net], [optimizer])


def accumulation(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    with fault:
        for index, (x, y) in enumerate(batches(6)):
            loss = F.cross_entropy(net(x), y) / 3
            loss.backward()
            losses.append(loss.item())
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return outcome(losses, [net], [optimizer])


def scaler(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = small()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses = []
    with fault:
        for x, y in batches(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.item(), scaler.get_scale()]
    return outcome(losses, [net], [optimizer])


def lbfgs(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = small()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    losses = []
    with fault:
        for x, y in batches(2):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)  # noqa: B023
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
    return outcome(losses, [net], [])


def dropout(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.1, inplace=True), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    generator = torch.Generator().manual_seed(2)

    def noise(x: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.randn_like(x) + 0.1 * torch.randn(x.shape, generator=generator)

    with fault:
        for x, y in batches(3):
            noisy = x + noise(x)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(noisy), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return outcome(losses, [net], [optimizer])


class Counting(nn.Module):
    """A model that counts and keeps things as it runs, so that a forward pass that runs twice is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 8))
        self.calls = 0
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        self.means.append(out.mean().item())
        return out


def batch_norm(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    net = Counting()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with fault:
        for x, y in batches(3):
            losses.append(train_step(x, y).item())
    return outcome([*losses, net.calls, *net.means], [net], [optimizer])


def gan(fault: OutOfMemory) -> Outcome:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    losses = []
    with fault:
        for real, _ in batches(2):
            fake = maker(torch.randn(16, 8))
            of_critic.zero_grad()
            loss_critic = critic(fake.detach()).mean() - critic(real).mean()
            loss_critic.backward()
            of_critic.step()
            of_maker.zero_grad()
            loss_maker = -critic(fake).mean()
            loss_maker.backward()
            of_maker.step()
            losses += [loss_critic.item(), loss_maker.item()]
    return outcome(losses, [maker, critic], [of_maker, of_critic])


class _Rows(torch.utils.data.Dataset[Any]):
    """A dataset for the frameworks, with a mapping for each item."""

    def __init__(self) -> None:
        self._batch = next(batches(1))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._batch[0][index], "labels": self._batch[1][index]}


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hugging_face(fault: OutOfMemory) -> Outcome:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        *("out",),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        logging_strategy="no",
    )
    torch.manual_seed(0)
    model = _WithLoss()
    trainer = Trainer(model=model, args=arguments, train_dataset=_Rows())
    with fault:
        result = trainer.train()
    return outcome([result.training_loss], [model], [])


def lightning(fault: OutOfMemory) -> Outcome:
    import lightning as pl

    losses = []

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _WithLoss()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    model = Lit()
    trainer = pl.Trainer(
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    with fault:
        trainer.fit(model, torch.utils.data.DataLoader(_Rows(), batch_size=4))
    return outcome(losses, [model], [])


LOOPS: dict[str, Loop] = {
    each.__name__: each for each in (momentum, adam, accumulation, scaler, lbfgs, dropout, batch_norm, gan)
}
FRAMEWORKS: dict[str, Loop] = {each.__name__: each for each in (hugging_face, lightning)}


class Result(msgspec.Struct):
    """A run with faults. `how` has the phases and means of its recoveries, or the reason against one."""

    at: int
    survived: bool
    same: bool
    how: list[str]


def report(name: str, count: int, times: int) -> None:
    """Run a loop with faults at operations spread over the whole run, and print a result for each."""
    torch.set_num_threads(1)
    loop = (LOOPS | FRAMEWORKS)[name]
    fault = OutOfMemory()
    wanted = loop(fault)
    results = []
    for index in range(count):
        fault_at = 1 + index * fault.count.value // count
        results.append(_with_fault(loop, wanted, OutOfMemory(fault_at, times, late=index % 2 == 1), fault_at))
    print(msgspec.json.encode(results).decode())


def _with_fault(loop: Loop, wanted: Outcome, fault: OutOfMemory, at: int) -> Result:
    with torchmedic.recover() as happened:
        try:
            found = loop(fault)
        except torch.OutOfMemoryError:
            return Result(
                at, False, False, [getattr(happened[-1], "reason", "") if happened else "nothing was noticed"]
            )
    how = [f"{each.phase} {getattr(each, 'means', 'refused')}" for each in happened]
    is_rounded = any("split" in each for each in how)
    return Result(at, True, same(found, wanted, is_rounded=is_rounded) and fault.has_fired, how)
