"""Recovery in one of two ranks: the other one waits for it, and both end with the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rank_jobs import free_port
from running import Finished, run_plain

SCRIPT = f"""
import os
import sys

import torch
import torch.distributed as dist
import torchmedic
from torch import nn

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from recovery_cases import OutOfMemory

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class InGelu(OutOfMemory):
    # In the middle of a backward pass: the gradients of the last layer have been sent, those of the first have not.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        if node is None or "Gelu" not in node.name():
            return func(*args, **(kwargs or {{}}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def train(where="", unlucky=0, **settings):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    net = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001, **settings)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(4):
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        faults = {{name: OutOfMemory() for name in ("forward", "backward", "update")}}
        if step == 2 and rank == unlucky and where:
            faults[where] = InGelu(1) if where == "backward" else OutOfMemory(5, 2 if where == "forward" else 1)
        with faults["forward"]:
            loss = net(x).square().mean()
        with faults["backward"]:
            loss.backward()
        with faults["update"]:
            optimizer.step()
        losses.append(loss.item())
    return losses + [each.sum().item() for each in net.parameters()]


wanted = train()
for where, unlucky, *refused in (("forward", 0), ("update", 1), ("backward", 1), ("backward", 1, "refused")):
    with torchmedic.recover() as happened:
        try:
            found = train(where, unlucky, gradient_as_bucket_view=bool(refused))
        except RuntimeError as error:  # the other rank is told by gloo that its peer is gone
            found = type(error).__name__
    how = [getattr(each, "means", None) or each.reason for each in happened]
    sys.stdout.write(f"{{rank}} {{where}}: {{found if isinstance(found, str) else found == wanted}} {{how}}\\n")
    sys.stdout.flush()
    if isinstance(found, str):
        break
os._exit(0)
"""


def test_two_ranks(tmp_path: Path) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def run(rank: str) -> Finished:
        folder = tmp_path / rank
        folder.mkdir()
        return run_plain(folder, SCRIPT, RANK=rank, LOCAL_RANK=rank, **job)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, "01"))
    told = sorted("".join(each.stdout for each in done).splitlines())
    reason = "other ranks take part in this backward pass, with gradient_as_bucket_view of DistributedDataParallel"
    assert told == [
        "0 backward: RuntimeError []",
        "0 backward: True []",
        "0 forward: True ['activations']",
        "0 update: True []",
        f"1 backward: OutOfMemoryError [{reason!r}]",
        "1 backward: True ['recompute']",
        "1 forward: True []",
        "1 update: True ['retry']",
    ], [each.stderr for each in done]
