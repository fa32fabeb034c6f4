"""The cost of the healthy path in instructions: the number of instructions of a step, without torchmedic and with it.

On a shared machine, the time of a step varies by more than torchmedic takes; the number of instructions does not. It is
counted in user space, in one process, as the difference between two blocks of steps, so that work that is done once per
block cancels. The counter is the processor's own if it may be used, else callgrind, under which the script starts
itself again. Instructions are not seconds: those of a matrix product take longer.

Only work that is done at every step is counted. Work on a schedule (memory readings, walks for leaks, checks of all
gradients) takes the same share of a second however short the steps are, and is left out; so are the first steps.

    python benchmarks/instructions.py [--counter hardware|callgrind] [--device cuda] [--recover] [--output NAME]

With `--recover`, the rows are those of `torchmedic run --recover safe`: with its guard down, as in a run that has used
less than half of every memory after ten updates, and with its guard up.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import gc
import math
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

UNDER = "TORCHMEDIC_COUNTING_UNDER"
WIDTH, BATCH = 32, 8
FEW, MANY = 3, 9  # steps per block
WARM_UP = 100  # steps, after which Python has specialised the code and memory is laid out
ROUND = 64  # steps, one of which is recorded in full if steps take less than 2.5 ms


class Counter(Protocol):
    """Counts the instructions of this process in user space."""

    name: str

    def of(self, work: Callable[[], None]) -> int:
        """The number of instructions of some work."""


class Hardware:
    """The processor's counter, through `perf_event_open`.

    Raises:
        OSError: The machine has no counter, or it may not be used.
    """

    name = "hardware (perf_event_open, instructions:u)"
    _CALL: ClassVar = {"x86_64": 298, "aarch64": 241}
    _SIZE = 128
    _FLAGS = 1 << 1 | 1 << 5 | 1 << 6  # inherit, for new threads; exclude_kernel; exclude_hv

    def __init__(self) -> None:
        number = self._CALL.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise OSError("no perf_event_open here")
        wanted = struct.pack("<IIQQQQQ", 0, self._SIZE, 1, 0, 0, 0, self._FLAGS).ljust(self._SIZE, b"\0")
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.syscall(number, ctypes.c_char_p(wanted), 0, -1, -1, 0)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def of(self, work: Callable[[], None]) -> int:
        before = self._read()
        work()
        return self._read() - before

    def _read(self) -> int:
        return int.from_bytes(os.read(self._descriptor, 8), "little")


class Callgrind:
    """Valgrind's simulated processor. Requests in machine code tell it when to count."""

    name = "callgrind"
    _REQUEST = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
    _DUMP, _ZERO, _START = 0x43540000, 0x43540001, 0x43540004

    def __init__(self, output: Path) -> None:
        self._output = output
        self._dumps = 0
        self._memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._memory.write(self._REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)

    def of(self, work: Callable[[], None]) -> int:
        if not self._dumps:
            self._ask(self._START)  # never stopped: stopping and starting again takes longer
        self._ask(self._ZERO)
        work()
        self._ask(self._DUMP)
        self._dumps += 1
        dumped = Path(f"{self._output}.{self._dumps}").read_text()
        found = re.search(r"^totals: (\d+)", dumped, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def _ask(self, request: int) -> None:
        words = (ctypes.c_uint64 * 6)(request)
        self._call(ctypes.addressof(words))

    @staticmethod
    def start(arguments: list[str]) -> int:
        """Run this script again under valgrind."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "counts"
            command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}", "-q"]
            environment = {**os.environ, UNDER: str(output), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            command += [sys.executable, __file__, *arguments]
            return subprocess.run(command, env=environment, check=False).returncode


def counter(wanted: str | None, device: str) -> Counter | str:
    """The counter for this machine, or the reason why there is none."""
    if os.environ.get(UNDER):
        return Callgrind(Path(os.environ[UNDER]))
    refused = ""
    if wanted != "callgrind":
        try:
            return Hardware()
        except OSError as error:
            refused = f"the processor's counter cannot be used ({error.strerror or error})"
    if wanted == "hardware" or device == "cuda":
        return (
            f"cannot count instructions here: {refused or 'callgrind knows no GPU'}; benchmarks/overhead.py takes time"
        )
    if platform.machine() == "x86_64" and shutil.which("valgrind"):
        return "callgrind"
    return f"cannot count instructions here: {refused}, and there is no valgrind; benchmarks/overhead.py takes time"


class Loop:
    """An ordinary training loop without a loader."""

    loader: Any = None

    def __init__(self, device: str) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) if index % 2 == 0 else nn.ReLU() for index in range(7)]
        self.model = nn.Sequential(*layers).to(device)
        self.batch = torch.randn(BATCH, WIDTH, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def with_loader(self) -> Loop:
        """The same loop, fed by a loader. It has no optimizer of its own: a step is over when all have stepped."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        loop = copy.copy(self)
        loop.loader = DataLoader(TensorDataset(torch.randn(4 * ROUND * BATCH, WIDTH)), batch_size=BATCH)
        return loop

    def run(self, steps: int) -> None:
        if self.loader is None:
            for _ in range(steps):
                self._step(self.batch)
            return
        batches = iter(self.loader)
        for _ in range(steps):
            self._step(next(batches)[0].to(self.batch.device))

    def _step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()


def per_step(count: Counter, loop: Loop, prepare: Callable[[], None] = lambda: None) -> float:
    """Instructions per step, from blocks of few and of many steps. The minimum of each excludes one-time work."""
    counted: dict[int, list[int]] = {FEW: [], MANY: []}
    gc.disable()  # a full collection would fall into one of the blocks
    for _ in range(3):
        for steps, found in counted.items():
            prepare()
            found.append(count.of(functools.partial(loop.run, steps)))
    gc.enable()
    return (min(counted[MANY]) - min(counted[FEW])) / (MANY - FEW)


def settle(agent: Any, *, short: bool) -> None:
    """The state after many steps, with no scheduled work left."""
    from torchmedic.observe.hooks import current_step

    longest = math.inf if short else 0.0
    current_step._MAX_SHORT_SECONDS = current_step._MAX_STILL_SHORT_SECONDS = current_step._MIN_LONG_SECONDS = longest
    agent.step.short_steps._most = longest
    agent.step.is_sampled_out = False
    agent.step.fast.leave()
    agent.step.fast._not_before = 0
    agent.step.short_steps.next_full = math.inf if short else 0
    agent.clock.step = 10_000 * ROUND + 1
    agent.clock.gauge.due = math.inf
    for account in agent.budget.accounts().values():
        account.spend(math.inf)
    agent.leaks.stop()
    agent.step.curves.due = math.inf
    agent.finite.memory._in_any_case = 0
    agent.rewind.give_up()


class Late:
    """Treat the CPU as a device whose values are read asynchronously."""

    def place(self, dtype: Any) -> tuple[Any, Any]:
        import torch

        return torch.empty((), dtype=dtype), self

    def query(self) -> bool:
        return True

    def arrange(self, host: Any, event: Any, value: Any) -> None:
        host.copy_(value)

    def places(self, count: int, dtype: Any) -> tuple[Any, Any]:
        import torch

        return torch.empty(count, dtype=dtype), None

    def arrange_many(self, host: Any, event: Any, values: Any) -> None:
        host[: values.numel()].copy_(values)

    def may_work(self) -> bool:
        return True

    def free_bytes(self, device: Any) -> int:
        return 1 << 40

    def timer(self) -> None:
        return None

    def when_out_of_memory(self, react: Any) -> None:
        pass


def with_guard(agent: Any) -> Iterator[str]:
    """Recovery in place, with its guard down and up."""
    from torchmedic.recovery import install

    install.install("safe", agent)
    assert install._installed is not None
    session = install._installed.session
    session._updates = 1 << 40  # the first updates, in which the guard is always up, are over
    for each in ("down", "up"):
        session._due = math.inf  # nobody looks at the memory in use
        session._is_update_safe = session.room.has_room_for_update()
        if each == "up":
            session.raise_guard()
        yield f"guard {each}"
    install._installed.remove()


def measure(count: Counter, device: str, *, recover: bool) -> list[dict[str, Any]]:
    import torch

    from torchmedic.integrations import telling
    from torchmedic.observe import lifecycle
    from torchmedic.observe.device import async_devices

    torch.set_num_threads(1)
    # Every run has a second thread, with which `malloc` takes more instructions. That is not torchmedic's cost.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    loop = Loop(device)
    loops = {"mlp": loop, "mlp, DataLoader": loop.with_loader()}
    plain = {}
    for loop in (*loops.values(), *loops.values()):
        loop.run(WARM_UP)
    for name, loop in loops.items():
        plain[name] = per_step(count, loop)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        telling.install(folder)
        agent = lifecycle.current()
        assert agent is not None
        agent.leaks.stop()
        while agent.habits.awake:  # the check-up of the first steps
            loops["mlp"].run(8)
        reads = ("at once", "late") if device == "cpu" else ("late",)
        for read in with_guard(agent) if recover else reads:
            if read == "late" and device == "cpu":
                async_devices.devices["cpu"] = Late()
            for name, loop in loops.items():
                own: dict[bool, float] = {}
                for short in (False, True):
                    again = functools.partial(settle, agent, short=short)
                    again()
                    loop.run(8)
                    own[short] = per_step(count, loop, again) - plain[name]
                # If steps are short, one per round is watched like a long one.
                own[True] += (own[False] - own[True]) / ROUND
                for short, taken in own.items():
                    rows.append(
                        {
                            "loop": name,
                            "values_are_read": read,
                            "steps": "short" if short else "long",
                            "plain": round(plain[name]),
                            "own": round(taken),
                            "ratio": round(1 + taken / plain[name], 4),
                        }
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
        agent.hooks.remove()
    return rows


def table(result: dict[str, Any]) -> str:
    lines = [
        "| loop | values are read | steps | plain, instructions | torchmedic's own | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['loop']} | {row['values_are_read']} | {row['steps']} | {row['plain']:,} | {row['own']:,} "
            f"| {row['ratio']:.4f}x |"
        )
    lines += ["", f"counted by {result['counter']}, one thread, torch {result['torch']}, Python {result['python']}:"]
    return "\n".join([*lines, f"`{result['command']}`"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counter", choices=("hardware", "callgrind"), help="by default the first available")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recover", action="store_true", help="with recovery in place, its guard down and up")
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json and NAME.md")
    args = parser.parse_args()
    count = counter(args.counter, args.device)
    if count == "callgrind":
        return Callgrind.start(sys.argv[1:])
    if isinstance(count, str):
        print(count, file=sys.stderr)
        return 1
    from measured_run import environment, save  # late, because it imports torch

    result = {
        **environment(args.device),
        "counter": count.name,
        "rows": measure(count, args.device, recover=args.recover),
    }
    text = table(result)
    print(text)
    save(args.output, result, "Instructions of the healthy path", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
