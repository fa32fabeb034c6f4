"""Jobs of several ranks: the cost of a step of DistributedDataParallel on gloo, and the time until a verdict.

    python benchmarks/ranks.py [--seconds 20] [--rounds 3] [--only-steps] [--output NAME]

The cost is measured in two ranks, in blocks of steps with and without torchmedic in turns, and compared block by block.
`rank part` is torchmedic compared with torchmedic without its log of collectives and its facts of a rank. The times
are from the moment at which a rank writes down that it goes wrong to the first line of the diagnosis.

Two ranks on two cores leave nothing for anybody else, so the accounts of a job under `torchrun -m torchmedic run` are
read too: the share of a core that the parent of a rank takes, how often it and the threads of torchmedic in the rank
wake up, and the time of one entry of the log of collectives. All are CPU clocks, which others on the machine do not
move much.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from measured_run import environment, save
from torch.nn.parallel import DistributedDataParallel

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent

TARGET = 1.01
STALL_AFTER = 5.0
_MAX_STALL_VERDICT = STALL_AFTER + 5.0
_MAX_DEATH_VERDICT = 3.0
_BLOCK_STEPS = {"mlp": 70, "transformer": 3}  # of short steps, one in about 35 is noted in full
_MIN_ROUNDS = 12

JOB = """
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    if step == 20 and dist.get_rank() == 1:
        with open("wrong", "w") as file:
            file.write(str(time.time()))
        WRONG
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
ACCOUNTED_JOB = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def accounts(pid):
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        folder = f"/proc/{pid}/task/{thread}"
        with open(f"{folder}/comm") as name, open(f"{folder}/schedstat") as time, open(f"{folder}/status") as status:
            wakes = next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt"))
            found[thread] = name.read().strip(), int(time.read().split()[0]), wakes
    return found

def difference(before, after, name):
    rows = [(now[1] - before[each][1], now[2] - before[each][2])
            for each, now in after.items() if each in before and name in now[0]]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [torch.nn.Linear(256, 256) if index % 2 == 0 else torch.nn.ReLU() for index in range(7)]
model, batch = DistributedDataParallel(torch.nn.Sequential(*layers)), torch.randn(64, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
going, begun, processes = torch.ones(1), None, (os.getpid(), os.getppid())
while going.item():
    for _ in range(20):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    now = time.monotonic()
    if begun is None and now - START > YOUNG:
        begun, before = now, [accounts(pid) for pid in processes]
    going.fill_(float(begun is None or now - begun < SECONDS))
    dist.broadcast(going, 0)
after, seconds = [accounts(pid) for pid in processes], time.monotonic() - begun
own, parent = difference(before[0], after[0], "torchmedic"), difference(before[1], after[1], "")
if dist.get_rank() == 0:
    with open("accounts", "w") as file:
        json.dump({"parent_share": parent[0] / 1e9 / seconds, "parent_wakes": parent[1] / seconds,
                   "threads_share": own[0] / 1e9 / seconds, "threads_wakes": own[1] / seconds}, file)
dist.destroy_process_group()
"""
_YOUNG_SECONDS = 21.0  # in which the parent looks more often
_ENTRIES = 4000

WRONG = {"stall": "dist.barrier()", "death": "os.kill(os.getpid(), signal.SIGKILL)"}


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    if name == "mlp":
        layers = [torch.nn.Linear(256, 256) if index % 2 == 0 else torch.nn.ReLU() for index in range(7)]
        return torch.nn.Sequential(*layers), torch.randn(64, 256)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 256)


def block(model: Any, optimizer: Any, batch: torch.Tensor, steps: int) -> tuple[float, float]:
    """Wall time of one step, and CPU time of its main thread: threads of gloo wait for the other rank, by load."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - wall) / steps, (time.thread_time() - cpu) / steps


def rank(number: int, port: int, folder: str, seconds: float, results: Any) -> None:
    """One of the two ranks. Rank 0 decides how long, so that both make the same number of blocks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE="2")
    torch.set_num_threads(1)
    telling.install(folder)
    agent = lifecycle.current()
    assert agent is not None
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, steps in _BLOCK_STEPS.items():
        torch.manual_seed(0)
        module, batch = build(name)
        model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        block(model, optimizer, batch, 3 * steps)
        rows: list[tuple[float, ...]] = []
        facts = agent.step.ranks
        going = torch.ones(1)
        end = time.monotonic() + seconds
        while going.item():
            watched = block(model, optimizer, batch, steps)
            agent.hooks.remove()
            plain = block(model, optimizer, batch, steps)
            agent.hooks.install()
            for account in agent.budget.accounts().values():
                account._at += plain[0] * steps  # a share of the watched time is spent
            agent.step.ranks = None
            agent.clock._step_closed = None
            alone = block(model, optimizer, batch, steps)
            agent.collectives.install()
            agent.step.ranks = facts
            rows.append((*plain, *watched, *alone))
            going.fill_(float(time.monotonic() < end or len(rows) < _MIN_ROUNDS))
            dist.broadcast(going, 0)
        found[name] = {
            "rounds": len(rows),
            "plain_ms": round(1e3 * statistics.median(row[0] for row in rows), 3),
            "ratio_wall": round(statistics.median(row[2] / row[0] for row in rows), 4),
            "ratio_cpu": round(statistics.median(row[3] / row[1] for row in rows), 4),
            "rank_part_ratio_cpu": round(statistics.median(row[3] / row[5] for row in rows), 4),
            "added_cpu_us": round(1e6 * statistics.median(row[3] - row[1] for row in rows), 1),
        }
    if number == 0:
        results.put((found, entry_microseconds(agent)))
    dist.barrier()
    dist.destroy_process_group()


def entry_microseconds(agent: Agent) -> dict[str, float]:
    """The time of one entry of the log: of a forward or backward of a model, and of a collective called from Python."""
    recorder, group, tensor = agent.collectives, dist.group.WORLD, torch.ones(8)
    assert group is not None
    marks = next(iter(recorder._models.values()))

    def mark() -> None:
        recorder._mark(marks.forward, marks.counts, 0)

    def note() -> None:
        recorder._note_safely("all_reduce", group, ([tensor],), {})

    found = {}
    for kind, write in (("mark", mark), ("collective", note)):
        rounds = []
        for _ in range(5):
            began = time.thread_time()
            for _ in range(_ENTRIES):
                write()
            rounds.append((time.thread_time() - began) / _ENTRIES)
        found[kind] = round(1e6 * min(rounds), 2)
    return found


def accounts(seconds: float) -> dict[str, float]:
    """What the parent of a rank, and the threads of torchmedic in the rank, take of a job."""
    with tempfile.TemporaryDirectory() as place:
        constants = f"import time\nSTART, YOUNG, SECONDS = time.monotonic(), {_YOUNG_SECONDS}, {seconds}\n"
        (Path(place) / "train.py").write_text(constants + ACCOUNTED_JOB)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        launch.append(f"--master-port={free_port()}")
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        medic = ["-m", "torchmedic", "run", "--output", "run", "train.py"]
        subprocess.run([*launch, *medic], cwd=place, check=True, env=env)
        return {name: round(value, 5) for name, value in json.loads((Path(place) / "accounts").read_text()).items()}


def overhead(seconds: float) -> tuple[dict[str, Any], dict[str, float]]:
    with tempfile.TemporaryDirectory() as place:
        context = torch.multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        arguments = (free_port(), str(Path(place) / "run"), seconds, results)
        (Path(place) / "run" / "stacks").mkdir(parents=True)
        both = [context.Process(target=rank, args=(number, *arguments)) for number in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        assert not results.empty(), "a rank has failed"
        found, entries = results.get()
        return found, entries


def verdict(kind: str) -> float:
    """Seconds from what went wrong to the first line of the diagnosis."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "train.py").write_text(JOB.replace("WRONG", WRONG[kind]))
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        launch.append(f"--master-port={free_port()}")
        medic = ["-m", "torchmedic", "run", "--output", "run", "--stall-after", str(STALL_AFTER), "--on-stall", "kill"]
        child = subprocess.Popen(
            [*launch, *medic, "train.py"],
            cwd=place,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        assert child.stderr is not None
        told = 0.0
        for line in child.stderr:
            if "error[TM" in line and not told:
                told = time.time()
        child.wait()
        assert told, "there was no diagnosis"
        return told - float((Path(place) / "wrong").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, for each model")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind that fail")
    parser.add_argument("--only-steps", action="store_true", help="the cost of a step, without accounts and verdicts")
    parser.add_argument("--output", help="name of the result files")
    arguments = parser.parse_args()
    steps, entries = overhead(arguments.seconds)
    if arguments.only_steps:
        print(json.dumps({"load": os.getloadavg()[0], "steps": steps, "entry_us": entries}, indent=1))
        return
    result: dict[str, Any] = {
        **environment("cpu"),
        "load": os.getloadavg()[0],
        "target_ratio": TARGET,
        "steps": steps,
        "entry_us": entries,
        "accounts": accounts(arguments.seconds),
        "stall_after_s": STALL_AFTER,
        "targets_s": {"stall": _MAX_STALL_VERDICT, "death": _MAX_DEATH_VERDICT},
        "verdict_s": {kind: [round(verdict(kind), 2) for _ in range(arguments.rounds)] for kind in WRONG},
    }
    rows = "\n".join(
        f"| {name} | {row['plain_ms']} | {row['ratio_wall']:.3f}x | {row['ratio_cpu']:.3f}x | "
        f"{row['rank_part_ratio_cpu']:.3f}x | {row['added_cpu_us']} |"
        for name, row in result["steps"].items()
    )
    text = (
        "| model | plain, ms | wall time | CPU time | rank part, CPU time | added, us of CPU a step |\n"
        "|---|---|---|---|---|---|\n"
        f"{rows}\n\nTarget: {TARGET}x. Verdict after a stall of {STALL_AFTER:g} s: {result['verdict_s']['stall']} s, "
        f"target {_MAX_STALL_VERDICT:g}. Verdict after a death: {result['verdict_s']['death']} s, target "
        f"{_MAX_DEATH_VERDICT:g}.\n\nParent of a rank: {result['accounts']['parent_share']:.2%} of a core, "
        f"{result['accounts']['parent_wakes']:.1f} wake-ups a second. Threads of torchmedic in a rank: "
        f"{result['accounts']['threads_share']:.3%}, {result['accounts']['threads_wakes']:.1f} wake-ups a second. An "
        f"entry of the log: {entries['mark']} us for a pass of a model, {entries['collective']} us for a collective "
        f"(target 5).\n\nLoad average {result['load']:.1f}, `{result['command']}`"
    )
    print(text)
    save(arguments.output, result, "Jobs of two ranks on gloo", text)


if __name__ == "__main__":
    main()
