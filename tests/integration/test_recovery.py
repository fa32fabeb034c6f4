"""`torchmedic run --recover`: a script that memory ends goes on, with the same output."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import Finished, clean_environment, run_plain, run_script

from torchmedic.records.recovery import Recovery
from torchmedic.runfolder.events import events_of

# Each result of a layer takes 36 MiB, and all that backward needs about 300 MiB.
SCRIPT = """
import resource
import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())])
optimizer = torch.optim.Adam(net.parameters())
data = torch.randn(150_000, 64)
if sys.argv[1:]:
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20, -1))
for step in range(2):
    optimizer.zero_grad()
    loss = net(data).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), net[0].weight.sum().item().hex())
"""

STUBBORN = """
    import torch
    from torch import nn

    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    hidden = net(x)
    hidden.retain_grad()
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()
        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    Fails.apply(hidden).sum().backward()
    """


def plain(folder: Path, *arguments: str) -> Finished:
    """The script without torchmedic."""
    return run_plain(folder, f"import sys\nsys.argv[1:] = {list(arguments)}\n{SCRIPT}")


def test_too_little_address_space(tmp_path: Path) -> None:
    wanted, without = (plain(tmp_path, *arguments) for arguments in ((), ("190",)))
    assert wanted.returncode == 0, wanted.stderr
    assert without.returncode == 1
    assert "can't allocate memory" in without.stderr
    finished = run_script(tmp_path, SCRIPT, "190", options=["--recover", "safe"])
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == wanted.stdout
    assert finished.report.diagnoses == ()
    found = events_of(finished.run / "rank0", "recovery", Recovery)
    assert found
    assert max(each.bytes for each in found) > 30 << 20
    said = finished.stderr.splitlines()
    begins = ("torchmedic: recovered from out-of-memory in the ", "torchmedic: avoided an out-of-memory in the ")
    assert all(line.startswith(begins) for line in said), finished.stderr
    assert len(said) == len({(each.is_avoided, each.phase, each.means) for each in found})


# The inner result takes 82 MB, and nothing else is large.
WIDE = (
    SCRIPT.replace(
        "net = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())])",
        """
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, x):
        return (x.unsqueeze(-1) * self.weight).tanh().sum(-1)

net = nn.Sequential(nn.Linear(64, 64), Wide(), nn.Linear(64, 64))
""",
    )
    .replace("150_000", "10_000")
    .replace(".item().hex()", ".item()")
)


@pytest.mark.parametrize("megabytes", ["100", pytest.param("180", marks=pytest.mark.slow)])
def test_a_module_in_parts_of_the_batch(tmp_path: Path, megabytes: str) -> None:
    """With 100 MiB the forward pass cannot go on, with 180 MiB the backward pass."""
    wanted, folder = run_script(tmp_path, WIDE), tmp_path / "limited"
    folder.mkdir()
    finished = run_script(folder, WIDE, megabytes, options=["--recover", "safe"])
    assert finished.returncode == 0, finished.stderr
    pairs = zip(finished.stdout.split(), wanted.stdout.split(), strict=True)
    assert all(float(one) == pytest.approx(float(other), rel=1e-5) for one, other in pairs)
    phase = "forward" if megabytes == "100" else "backward"
    assert f"in the {phase} pass once, first at step 0: calls of " in finished.stderr
    assert "were made in parts of the batch" in finished.stderr


def test_says_why_not(tmp_path: Path) -> None:
    finished = run_script(tmp_path, textwrap.dedent(STUBBORN), options=["--recover", "safe"])
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    reason = "an intermediate result retains its gradient"
    assert last == f"torchmedic: not recovered from out-of-memory in the backward pass: {reason}"


@pytest.mark.slow
def test_says_that_compiled_code_is_not_repeated(tmp_path: Path) -> None:
    source = """
        import resource
        import torch

        model = torch.compile(torch.nn.Linear(64, 64), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (8, 8, 10_000_000):
            model(torch.zeros(1, 64).expand(rows, 64)).sum().backward()
            optimizer.step()
            taken = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, -1))
    """
    finished = run_script(tmp_path, textwrap.dedent(source), options=["--recover", "safe"])
    assert finished.returncode == 1
    reason = "the script uses torch.compile, and calls of compiled code are not repeated"
    assert f"torchmedic: not recovered from out-of-memory in the forward pass: {reason}" in finished.stderr


@pytest.mark.parametrize("options", [[], ["--recover", "off"]])
def test_off_unless_asked_for(tmp_path: Path, options: list[str]) -> None:
    source = """
        import torch
        net = torch.nn.Linear(2, 2)
        torch.optim.Adam(net.parameters())
        print(torch._C._len_torch_function_stack(), type(torch.autograd.Variable._execution_engine).__module__)
        """
    finished = run_script(tmp_path, textwrap.dedent(source), options=options)
    assert finished.stdout == "0 torch._C\n"


# The last operation of an update fails twice, so that optimizer state is parked; then somebody reads the state.
FAULTY = f"""
import sys

import torch

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from recovery_cases import OutOfMemory

torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(net.parameters())
counted = OutOfMemory()
for step in range(4):
    optimizer.zero_grad()
    net(torch.ones(4, 64)).square().mean().backward()
    if step != 2:
        counted.count.value = 0
        with counted:
            optimizer.step()
        continue
    try:
        with OutOfMemory(counted.count.value, 2):
            optimizer.step()
    except torch.OutOfMemoryError:
        print("stopped")
        break
    print(len(optimizer.state_dict()["state"]))
print("done")
"""


def test_bad_numbers_are_found_after_optimizer_memory_was_parked(tmp_path: Path) -> None:
    poisoned = "net(torch.full((4, 64), 1.0 if step < 3 else float('nan'))).square().mean().backward()"
    source = FAULTY.replace("net(torch.ones(4, 64)).square().mean().backward()", poisoned)
    assert source != FAULTY
    finished = run_script(tmp_path, source, options=["--recover", "safe"])
    assert finished.stdout == "2\ndone\n", finished.stderr
    assert [each.means for each in events_of(finished.run / "rank0", "recovery", Recovery)] == ["optimizer"]
    assert [each.code[:3] for each in finished.report.diagnoses] == ["TM2"]


@pytest.mark.parametrize(
    "hook", ["", "recover.build", "recover.event", "recover.install", "recover.state", "recover.update"]
)
def test_a_fault_of_its_own_is_contained(tmp_path: Path, hook: str) -> None:
    finished = run_script(tmp_path, FAULTY, options=["--recover", "safe"], TORCHMEDIC_INJECT_FAULT=hook)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ("stopped\n" if hook in ("recover.build", "recover.install") else "2\n") + "done\n"
    mentions = [line for line in finished.stderr.splitlines() if line.startswith("torchmedic: a fault of its own")]
    assert [hook in line for line in mentions] == ([True] if hook else []), finished.stderr


RANKS = f"""
import hashlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from recovery_cases import OutOfMemory

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
net = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):  # DDP lays out its buckets in the second step
    optimizer.zero_grad()
    data = torch.full((8, 64), 1.0 + rank + step)
    at = 2 if rank and step == 2 else 0
    with OutOfMemory(at if sys.argv[1] == "forward" else 0):
        loss = net(data).square().mean()
    with OutOfMemory(at if sys.argv[1] == "backward" else 0):
        loss.backward()
    with OutOfMemory(at if sys.argv[1] == "update" else 0):
        optimizer.step()
print(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest() + ";", end="")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    """One rank recovers alone, also in a backward pass, in which all take part: the others wait for its gradients."""
    (tmp_path / "job.py").write_text(RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for where in ("nowhere", "forward", "update", "backward"):
        command = [sys.executable, *launcher, "-m", "torchmedic", "run", "--recover", "safe", "job.py", where]
        found[where] = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=200
        )
    assert found["nowhere"].returncode == 0, found["nowhere"].stderr
    assert len(set(found["nowhere"].stdout.split(";"))) == 2  # the weights of both ranks, and nothing after them
    names = {"forward": "forward pass", "backward": "backward pass", "update": "update of the weights"}
    for where, name in names.items():
        assert found[where].returncode == 0, found[where].stderr
        assert found[where].stdout == found["nowhere"].stdout
        assert f"torchmedic: recovered from out-of-memory in the {name} once" in found[where].stderr
