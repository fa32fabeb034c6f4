"""What a script can see of torchmedic: nothing. Each script prints what it sees, without torchmedic and with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import Ended, plainly
from running import run_plain, run_script

pytestmark = pytest.mark.timeout(300)  # processes that import torch

HEAD = """
import hashlib, io, pickle, sys, warnings, weakref
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def digest(model):
    seen = hashlib.sha256()
    for tensor in model.state_dict().values():
        seen.update(tensor.detach().float().numpy().tobytes())
    return seen.hexdigest()


torch.manual_seed(0)
"""

# A module takes a function of torch in the middle of an evaluation, and is saved afterwards.
CAPTURED_FUNCTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.drop = self.attend = None

    def forward(self, x):
        if not self.training and self.drop is None:
            self.drop, self.attend = F.dropout, F.scaled_dot_product_attention
        return self.b(F.dropout(self.a(x), 0.1, self.training))


originals = F.dropout, F.scaled_dot_product_attention
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    model.train()
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    print(F.dropout is originals[0], model.drop is originals[0], model.attend is originals[1])
    torch.save(model, io.BytesIO())
"""

# A dispatch mode of the user's that adds noise, and counts what it sees.
USERS_MODE = """
from torch.utils._python_dispatch import TorchDispatchMode


class Noise(TorchDispatchMode):
    calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Noise.calls.append(str(func))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and "detach" not in str(func):
            out = out + 1e-3
        return out


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    with Noise():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8) * step).square().mean()
        loss.backward()
        optimizer.step()
print(len(Noise.calls), digest(model))
print(sorted(set(Noise.calls)))
"""

USERS_FUNCTION_MODE = """
from torch.overrides import TorchFunctionMode


class Count(TorchFunctionMode):
    names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Count.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
with Count():
    for step in range(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(4, 8) * step), torch.zeros(4, 1))
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad(), Count():
    model(torch.ones(2, 8))
print(len(Count.names), digest(model))
print(Count.names)
"""

SUBCLASS = """
class Logged(torch.Tensor):
    calls = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logged.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Items(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((8,), float(index)), float(index)


def collate(items):
    return torch.stack([x for x, _ in items]).as_subclass(Logged), torch.tensor([y for _, y in items])


for x, y in DataLoader(Items(), batch_size=4, collate_fn=collate):
    optimizer.zero_grad()
    loss = (model(x).squeeze(1) - y).square().mean()
    loss.backward()
    optimizer.step()
print(len(Logged.calls), Logged.calls)
print(digest(model))


class Quantity(torch.Tensor):
    def item(self):
        raise TypeError("a quantity has a unit")

    detach = __bool__ = __len__ = item


for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().as_subclass(Quantity).backward()
    optimizer.step()
print(digest(model))
"""

PROFILED = """
from torch.profiler import ProfilerActivity, profile

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with profile(activities=[ProfilerActivity.CPU]) as prof:
    for step in range(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(4, 8) * step), torch.zeros(4, 1))
        loss.backward()
        optimizer.step()
        loss.item()
for event in sorted(prof.key_averages(), key=lambda event: event.key):
    print(event.key, event.count)
"""

# When each object of a step is freed, by line.
LIFETIMES = """
class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class Items(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((256, 64), float(index))


def collate(items):
    kind = collate.kind
    tensor = torch.stack(items)
    made = {"box": lambda: Box(tensor), "tensor": lambda: tensor, "dict": lambda: {"x": tensor},
            "list": lambda: [tensor], "array": lambda: tensor.numpy()}[kind]()
    collate.alive.append(weakref.ref(tensor))
    return made


def alive(refs):
    return [ref() is not None for ref in refs]


def train(kind):
    collate.kind, collate.alive = kind, []
    model = nn.Linear(64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in DataLoader(Items(), batch_size=4, collate_fn=collate):
        x = batch if kind == "tensor" else batch.tensor if kind == "box" else batch["x"] if kind == "dict" else batch[0]
        x = torch.as_tensor(x).reshape(-1, 64)
        output = model(x)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        refs = [weakref.ref(x), weakref.ref(output), weakref.ref(loss)]
        print(kind, "before step", alive(refs))
        optimizer.step()
        print(kind, "after step", alive(refs))
        del output, loss
        print(kind, "outputs deleted", alive(refs))
        del batch, x
        print(kind, "batch deleted", alive(refs), alive(collate.alive))
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)]
    del model, optimizer
    print(kind, "model deleted", alive(refs))


for kind in ("tensor", "box", "dict", "list", "array"):
    train(kind)


def step(model=None, optimizer=None):
    model, optimizer = model or MODEL, optimizer or OPTIMIZER
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()


MODEL = nn.Linear(8, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
for _ in range(3):
    step()
refs = [weakref.ref(MODEL), weakref.ref(OPTIMIZER)]
del MODEL, OPTIMIZER
print("names that a step binds anew", alive(refs))
"""

WARNINGS = """
warnings.filterwarnings("error", module="nothing")
warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", module="torch.optim.lr_scheduler")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x):
        warnings.warn("forward of the user", stacklevel=2)
        return self.inner(x)


model = nn.Sequential(Noisy())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
for step in range(4):
    optimizer.zero_grad()
    output = model(torch.ones(4, 8))
    loss = F.mse_loss(output, torch.zeros(4, 1))
    warnings.warn(f"user {step % 2}")
    loss.backward()
    loss.grad  # warns: not a leaf
    optimizer.step()
    schedule.step(step)  # warns: the argument is deprecated
    try:
        model(torch.ones(4, 7))
    except RuntimeError:
        import traceback
        traceback.print_exc()
    try:
        loss.backward()
    except RuntimeError:
        traceback.print_exc()
torch.nn.utils.clip_grad_norm_([], 1.0)
"""

# Methods that are taken from an object once and called many times.
KEPT_METHODS = """
loader = iter(DataLoader([torch.full((8,), float(i)) for i in range(8)], batch_size=4))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
fetch, clear, update, advance = loader.__next__, optimizer.zero_grad, optimizer.step, schedule.step
for _ in range(2):
    loss = model(fetch()).square().mean()
    clear()
    loss.backward()
    update()
    advance()
    print(loss.item(), schedule.get_last_lr())
try:
    fetch()
except StopIteration as end:
    print(repr(end), fetch.__name__)
"""

SETTINGS = """
import time

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = set()
time.time = lambda: seen.add("time") or 1e9  # as a library does that freezes the clock


class Look(nn.Module):
    def forward(self, x):
        seen.add((torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), torch.is_grad_enabled()))
        return x


stack = nn.Sequential(model, Look())
for step in range(6):
    optimizer.zero_grad()
    loss = stack(torch.ones(4, 8)).square().mean()
    seen.add((torch.is_anomaly_enabled(), "after forward"))
    node = loss.grad_fn
    loss.register_hook(lambda gradient: seen.add((torch.is_anomaly_enabled(), "in backward")))
    loss.backward()
    seen.add(str(node.metadata))
    optimizer.step()
print(sorted(map(str, seen)))
"""

DESCRIPTORS = """
import os

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


train(3)
first = open("first.txt", "w")
print(first.fileno() < 64)
os.closerange(3, 512)  # as a daemon does
files = [open(f"{number}.bin", "w+b", buffering=0) for number in range(24)]
reading, writing = os.pipe()
os.write(writing, b"of the script")
train(12)
import time; time.sleep(1.5)  # a line of memory is written once a second
train(12)
print([os.fstat(file.fileno()).st_size for file in files], os.read(reading, 99))
"""

DROPPED = """
import sys
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=8)
held = [iter(loader)]
for (x,) in held[0]:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
held += [model, loader]
del x, model, loader, optimizer
seen = []  # Python code that runs where the last reference goes: an exception of a signal handler would be lost there
sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name) if event == "call" else None)
held.clear()
sys.setprofile(None)
print(seen)
"""

# Values that a step reads and assigns again are noted for a replay: an array is resized, its shared memory is closed,
# an image is not asked what only an array can answer, nor a subclass anything.
CARRIED = """
import numpy as np
from multiprocessing.shared_memory import SharedMemory


class Picture:
    def __init__(self, array):
        self.array = array

    @property
    def __array_interface__(self):
        return self.array.__array_interface__


class Logged(torch.Tensor):
    calls = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logged.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
image, array = Picture(np.ones((4, 8), np.float32)), np.ones((4, 8), np.float32)
state = torch.zeros(8).as_subclass(Logged)
for step in range(20):
    memory = SharedMemory(create=True, size=128)
    shared = np.ndarray((4, 8), np.float32, buffer=memory.buf)
    shared[:] = step * 0.01
    x = torch.from_numpy(np.asarray(image)) + torch.from_numpy(array) + torch.from_numpy(shared)
    optimizer.zero_grad()
    loss = model(x + state.sum()).square().mean()
    loss.backward()
    optimizer.step()
    image, state = Picture(np.asarray(image) * 0.5), state * 0.5
    del shared
    memory.close()
    memory.unlink()
    array.resize((5, 8))
    array = array[:4].copy()
print(Logged.calls)
print(digest(model))
"""

# The loss rises for a reason, so that the last steps are run again. Objects that end tell of it: their counts are right
# afterwards, and of the cycles that wait for a collector none ends early, as it is turned off.
LIVES = """
import gc

gc.disable()
ended, told, alive, free = [], [], 0, [0, 1, 2]
gc.callbacks.append(lambda phase, info: told.append(phase))


class Slot:
    def __init__(self):
        global alive
        alive += 1
        self.number = free.pop(0)

    def __del__(self):
        global alive
        alive -= 1
        free.append(self.number)


class Round:
    def __init__(self, number):
        self.me = self
        weakref.finalize(self, ended.append, number)


model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(50):
    slots, cycle = [Slot()], Round(step)
    x = torch.randn(16, 6)
    loss = (model(x).squeeze(1) - x.sum(1) * (1 if step < 30 else 9)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del slots
    print(step, alive, free, len(ended), len(told))
gc.collect()
print(sorted(ended), told)
print(digest(model))
"""

# Such a run, on tensors that count the calls that they see.
RISING_SUBCLASS = """
class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


model = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
for step in range(50):
    x = torch.randn(10, 6).as_subclass(Counted)
    loss = (model(x) - x.sum(1, keepdim=True) * (1 if step < 30 else 11)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, Counted.calls, type(loss).__name__)
print(digest(model))
"""

# Such a run draws its data from iterators that C code reads, from bounded caches, from files, queues and semaphores.
STREAMS = """
import asyncio, collections, contextvars, csv, functools, itertools, multiprocessing, queue, random, threading

random.seed(0)
with open("rows.csv", "w") as file:
    file.write("".join(f"{row},{row * row}\\n" for row in range(900)))


def numbers():
    yield from itertools.count()


@functools.lru_cache(maxsize=6)
def projection(key):
    return torch.randn(6, 6)


class Key:
    pass


stream, pairs, letters = numbers(), zip(numbers(), itertools.cycle("ab")), itertools.cycle(range(5))
rows, lines = csv.reader(open("rows.csv")), open("rows.csv")
unread = iter(open("rows.csv"))
simple, coming, permits = queue.SimpleQueue(), asyncio.Queue(), threading.Semaphore(100)
local, variable, keys = threading.local(), contextvars.ContextVar("v", default=0), []
number = multiprocessing.Value("i")
known = weakref.WeakValueDictionary()
local.count = 0
model = nn.Linear(6, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 6)
    y = x @ projection(random.randrange(9)) * (1 if step < 30 else 9)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    some, ends = list(itertools.islice(stream, 3)), [row for _, row in zip(range(2), rows)]
    for first, letter in pairs:
        if first % 3 == 2:
            break
    line = lines.readline()
    for last in unread:
        break
    a, b = itertools.islice(letters, 2)
    simple.put(step)
    got = simple.get() if step % 2 else None
    coming.put_nowait(step)
    permits.acquire()
    local.count += 1
    variable.set(variable.get() + 1)
    number.value += 1
    keys.append(Key())
    known[step] = keys[-1]
    optimizer.step()
    print(step, loss.item(), some, ends, first, letter, line, last, a, b, got, simple.qsize(), coming.qsize())
    print(local.count, variable.get(), number.value, len(known), random.random(), projection.cache_info().currsize)
print(digest(model), permits._value)
"""

# Such a run, whose batches another thread puts into a deque.
FED_BY_A_THREAD = """
import collections, threading


class Feeder:
    def __init__(self, count):
        self.buffer, self.count = collections.deque(), count
        self.ready, self.free = threading.Semaphore(0), threading.Semaphore(4)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        generator = torch.Generator().manual_seed(5)
        for number in range(self.count):
            self.free.acquire()
            self.buffer.append((number, torch.randn(8, 6, generator=generator)))
            self.ready.release()

    def get(self):
        self.ready.acquire()
        item = self.buffer.popleft()
        self.free.release()
        return item


feeder = Feeder(60)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(60):
    number, x = feeder.get()
    loss = (model(x) - x.sum(1, keepdim=True) * (1 if step < 30 else 12)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, loss.item())
print(digest(model))
"""

# Hooks for saved tensors see what the script saves and what its backward passes read, and no look at the graph.
PACKED = """
from torch.utils.checkpoint import checkpoint

seen = []
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    x = torch.randn(16, 8, requires_grad=step % 2 == 1)
    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: seen.append("pack") or tensor, lambda packed: seen.append("unpack") or packed
    ):
        out = checkpoint(model, x, use_reentrant=False) if step % 2 else model(x)
        loss = F.mse_loss(out.squeeze(1), x.detach().sum(1))
    loss.backward()
    optimizer.step()
    print(step, len(seen))
print(seen)
print(digest(model))
"""

# `torch.jit.trace` takes down every operation, also one of which nothing is left in the graph but a number.
TRACED = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    if step % 2:
        print(torch.jit.trace(model.eval(), torch.ones(2, 8)).graph)
        model.train()
"""

# There is one faulthandler per process. A script asks whether it is on, and gets the stacks where it wants them.
FAULTHANDLER = """
import faulthandler, os, signal, tempfile

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.13

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()


train()
print(faulthandler.is_enabled(), faulthandler.disable(), faulthandler.is_enabled())
print([pickle.loads(pickle.dumps(each)) is each for each in (faulthandler.enable, faulthandler.is_enabled)])
print(faulthandler.is_enabled.__doc__, faulthandler.enable.__name__)
with tempfile.TemporaryFile() as file:
    faulthandler.enable(file=file, all_threads=False)
    train()
    print(faulthandler.is_enabled())
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    print(os.wait()[1] & 127)
    file.seek(0)
    print(file.read().decode().splitlines()[0])
    print(faulthandler.disable(), faulthandler.is_enabled(), faulthandler.disable())
try:
    faulthandler.enable(file="nothing")
except Exception as error:
    print(type(error).__name__, faulthandler.is_enabled())
"""

# A file of torchmedic that a forked child takes over from its parent is no file that the script has left open.
LEFT_OPEN = """
import os

warnings.simplefilter("error", ResourceWarning)
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.13
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader([torch.ones(8)] * 8, batch_size=2, num_workers=2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
if os.fork() == 0:
    sys.exit()
print(os.wait()[1])
"""

SCRIPTS = {
    "hooks for saved tensors": PACKED,
    "traced": TRACED,
    "faulthandler": FAULTHANDLER,
    "files of a forked child": LEFT_OPEN,
    "carried values": CARRIED,
    "fed by a thread": FED_BY_A_THREAD,
    "streams": STREAMS,
    "rising loss of a subclass": RISING_SUBCLASS,
    "lives": LIVES,
    "function captured in an evaluation": CAPTURED_FUNCTION,
    "dispatch mode": USERS_MODE,
    "function mode": USERS_FUNCTION_MODE,
    "tensor subclass": SUBCLASS,
    "profiler": PROFILED,
    "lifetimes": LIFETIMES,
    "warnings and tracebacks": WARNINGS,
    "kept methods": KEPT_METHODS,
    "settings": SETTINGS,
    "descriptors": DESCRIPTORS,
    "dropped objects": DROPPED,
}
# Compared with a Python that has never imported torchmedic; the others with a fork that has imported it.
NEW_PROCESS = ("function captured in an evaluation", "profiler", "warnings and tracebacks")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_nothing_of_torchmedic(tmp_path: Path, name: str) -> None:
    other = run_script(tmp_path, HEAD + SCRIPTS[name])
    plain = plainly(tmp_path, "train.py") if name in NEW_PROCESS else forked(tmp_path, HEAD + SCRIPTS[name])

    assert plain.status == 0, plain.stderr
    assert other.returncode == plain.status, other.stderr
    assert other.stdout == plain.stdout
    assert without_times(other.stderr) == without_times(plain.stderr)


def forked(folder: Path, source: str) -> Ended:
    done = run_plain(folder, source)
    return Ended(done.returncode, done.stdout, done.stderr)


def without_times(text: str) -> str:
    """What a script wrote, but the lines in which the profiler tells the time."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("USDT:"))
