"""The cost of a step in processes of their own: some run plainly, others under `torchmedic run`, and they take turns.

No process ever changes its hooks, so that its inline caches stay as they are in a real run. All processes are started
and warmed up first; then each runs a short block in every round while the others wait for their turn, so that changes
in the speed of the machine cancel. Two processes of one kind can differ by more than torchmedic costs, as their memory
is laid out differently. So there are several of each kind, and the lower quartiles are compared.

Checks that torchmedic makes by the clock, such as a look at the memory once a second, also become due while a process
waits for its turn. Short blocks therefore make these checks look too expensive: use long blocks (`--block 2`), or
`--at-once` on a machine with a core for each process. There all processes run at the same time, with one thread each,
and change cores after every block.

    python benchmarks/turns.py [--device cuda] [--models mlp cnn] [--processes 4] [--seconds 20] [--clock cpu]
    python benchmarks/turns.py --at-once --block 2 --seconds 60       # on the CPU
    python benchmarks/turns.py --kinds plain torchmedic recover      # `recover` is torchmedic run --recover safe
    python benchmarks/turns.py --ranks 2 --block 2       # jobs of two ranks: torchrun, DistributedDataParallel on gloo
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WARM_UP_SECONDS, WARM_UP_STEPS = 2.0, 700  # the longer of both, but
MAX_WARM_UP_SECONDS = 15.0
BLOCK_SECONDS = 0.15
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Process:
    """A training loop that runs a block of steps when it is asked to."""

    def __init__(self, kind: str, command: Sequence[str]) -> None:
        self.kind = kind
        self.blocks: list[float] = []  # seconds per step
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of kind {self.kind!r} ended with {self._process.wait()}")
        return float(line)

    def begin(self, steps: int, core: int = -1) -> None:
        assert self._process.stdin is not None
        print(steps, core, file=self._process.stdin, flush=True)

    def block(self, steps: int, core: int = -1) -> None:
        self.begin(steps, core)
        self.blocks.append(self.answer())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait(30)

    @property
    def step_seconds(self) -> float:
        return statistics.quantiles(self.blocks, n=4)[0]


def measure(
    model: str,
    device: str,
    *,
    loads: bool,
    processes: int,
    seconds: float,
    clock: str = "wall",
    kinds: Sequence[str] = ("plain", "torchmedic"),
    block: float = BLOCK_SECONDS,
    at_once: bool = False,
    ranks: int = 1,
) -> dict[str, list[float]]:
    """The seconds of a step in each process of each kind, smallest first."""
    if at_once or ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    script = [str(Path(__file__).resolve()), "--worker", model, "--device", device, "--clock", clock]
    script += ["--loads"] if loads else []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        started: list[Process] = []
        warm: list[float] = []  # seconds of a step
        for number in range(processes):
            for kind in kinds:
                # A process that waits for its turn is no stall.
                watched = ["-m", "torchmedic", "run", "--stall-after", "0", "--output", f"{folder}/{kind}-{number}"]
                watched += ["--recover", "safe"] if kind == "recover" else []
                watched = watched if kind != "plain" else []
                started.append(Process(kind, [sys.executable, *launcher(ranks), *watched, *script, "--kind", kind]))
                closing.callback(started[-1].close)
                if device == "cpu" and not at_once:  # threads of two processes that spin would wait for each other
                    warm.append(started[-1].answer())
        slowest = max(warm or [process.answer() for process in started])
        steps = max(2, int(block / slowest))
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(started[0].blocks) < 4:
            (together if at_once else in_turn)(started, steps)
    return {kind: sorted(each.step_seconds for each in started if each.kind == kind) for kind in kinds}


def launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *address]


def in_turn(started: Sequence[Process], steps: int) -> None:
    """A block of each process, one process after the other."""
    for process in started if len(started[0].blocks) % 2 else reversed(started):
        process.block(2)  # the caches of the processor hold what another process has worked on
        process.blocks.pop()
        process.block(steps)


def together(started: Sequence[Process], steps: int) -> None:
    """A block of all processes at the same time, each on another core than before."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(started):
        raise SystemExit(f"{len(started)} processes at once need as many cores; this machine has {len(cores)}")
    turn = len(started[0].blocks)
    for number, process in enumerate(started):
        process.begin(steps, cores[(number + turn) % len(cores)])
    for process in started:
        process.blocks.append(process.answer())


def low(values: Sequence[float]) -> float:
    """The lower quartile of the processes of one kind: those whose memory is laid out well."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def work(model: str, device: str, clock: str, kind: str, *, loads: bool) -> None:
    """Be one of the processes."""
    from loops import MODELS, Loop, mlp

    build = next(build for build in (mlp, *MODELS[device]) if build.__name__ == model)
    loop = Loop(build, device, CLOCKS[clock], loads=loads)
    if "WORLD_SIZE" in os.environ:
        work_as_rank(loop)
        return
    begun = time.monotonic()
    for number in range(1 << 20):
        loop.block(1)
        taken = time.monotonic() - begun
        if taken > MAX_WARM_UP_SECONDS or (taken > WARM_UP_SECONDS and number > WARM_UP_STEPS):
            break
    with changed(kind):
        print(loop.block(5), flush=True)
        for line in sys.stdin:
            steps, core = map(int, line.split())
            if core >= 0:
                os.sched_setaffinity(0, {core})
            print(loop.block(steps), flush=True)


def work_as_rank(loop: Any) -> None:
    """Be one rank of a job. Rank 0 hears whose turn it is, and tells the others through the store."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    loop.model = DistributedDataParallel(loop.model)
    store, is_first = dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    loop.block(WARM_UP_STEPS)
    seconds = loop.block(5)
    for number in range(1 << 20):
        if is_first:
            print(seconds, flush=True)
            store.set(f"turn{number}", sys.stdin.readline() or "end")
        line = store.get(f"turn{number}").decode()
        if line == "end":
            break
        seconds = loop.block(int(line.split()[0]))
    dist.destroy_process_group()


@contextlib.contextmanager
def changed(kind: str) -> Iterator[None]:
    """Leave out what the name of a kind says: `torchmedic-removed`, `torchmedic-paused`; see `ablation.py` for more."""
    _, _, name = kind.partition("torchmedic-")
    if name:
        from torchmedic.observe import lifecycle

        agent = lifecycle.current()
        assert agent is not None
        without(agent, name)
    yield


def without(agent: Any, name: str) -> None:
    """Remove hooks for good."""
    if name == "removed":
        agent.hooks.remove()
        return
    if name == "paused":
        agent.step.paused = True
        agent.step.fast.on = False
        return
    raise ValueError(f"no such variant: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", default=["mlp"])
    parser.add_argument("--processes", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--loads", action="store_true", help="feed the loop by a DataLoader")
    parser.add_argument("--kinds", nargs="+", default=["plain", "torchmedic"])
    parser.add_argument("--block", type=float, default=BLOCK_SECONDS, help="seconds of a block")
    parser.add_argument("--at-once", action="store_true", help="all processes at the same time, a core for each")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each job, on gloo")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.device, args.clock, args.kind, loads=args.loads)
        return
    for model in args.models:
        found = measure(
            model,
            args.device,
            loads=args.loads,
            processes=args.processes,
            seconds=args.seconds,
            clock=args.clock,
            kinds=args.kinds,
            block=args.block,
            at_once=args.at_once,
            ranks=args.ranks,
        )
        plain = low(found["plain"])
        for kind, values in found.items():
            each = " ".join(f"{value * 1e6:.0f}" for value in values)
            name = model + (", DataLoader" if args.loads else "") + (f", {args.ranks} ranks" if args.ranks > 1 else "")
            print(f"{name:16s} {kind:28s} {low(values) * 1e6:8.1f} us {low(values) / plain:.4f}x  ({each})", flush=True)


if __name__ == "__main__":
    main()
