"""`torchmedic.watch()` and `diagnose` in scripts that torchmedic did not start."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from running import Finished, marked_line, run_plain, run_script

START = """
import json
import sys
import traceback

import torch
from torch import nn

import torchmedic

torch.manual_seed(0)


def make():
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

"""

FAILING = (
    START
    + """
model, optimizer = make()


def step():
    h = torch.sigmoid(model(torch.randn(8, 4)))
    h += 1  # <- cause
    h.square().mean().backward()


def outer():
    with torchmedic.watch():
        step()


try:
    with torchmedic.watch() as watch:
        outer()
except RuntimeError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    caught = torchmedic.diagnose(error)
    told = {"frames": frames, "notes": sorted(vars(error)), "caught": caught and caught.code, "run": str(watch.run)}
    print(json.dumps(told))
    print(json.dumps([found.code for found in watch.diagnoses]))
"""
)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_plain(tmp_path_factory.mktemp("failed"), FAILING)


def test_an_exception_that_leaves_the_block_is_explained_once(failed: Finished) -> None:
    assert failed.returncode == 0, failed.stderr
    assert failed.stderr.count("error[TM102]") == 1, failed.stderr
    found = failed.only
    assert found.cause_location is not None
    assert found.cause_location.line == marked_line(FAILING)
    assert found.treatments[0].proven


def test_the_exception_goes_on_unchanged(failed: Finished) -> None:
    told = json.loads(failed.stdout.splitlines()[0])

    assert told["frames"] == ["<module>", "outer", "step", "backward", "backward", "_engine_run_backward"]
    assert told["notes"] == []
    assert told["caught"] == "TM102"
    assert json.loads(failed.stdout.splitlines()[1]) == ["TM102"]


def test_the_run_folder_is_that_of_a_run(failed: Finished) -> None:
    told = json.loads(failed.stdout.splitlines()[0])

    assert Path(told["run"]) == failed.run
    assert stat.S_IMODE(failed.run.stat().st_mode) == 0o700
    assert {path.name for path in failed.run.iterdir()} == {"rank0", "report.json", "report.html"}
    outcome = failed.report.outcome
    assert (outcome.exit_status, outcome.symptom) == (1, "exception")


HEALTHY = (
    START
    + """
from torch.nn import utils
from torch.nn.modules import module
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, optimizer as optim
from torch.utils.data import DataLoader, TensorDataset, dataloader


def of_torch():
    iterator = vars(dataloader._BaseDataLoaderIter)
    return [
        torch.autograd._engine_run_backward, Optimizer.zero_grad, Optimizer._patch_step_function,
        utils.clip_grad_norm_, clip_grad.clip_grad_norm_, torch.amp.GradScaler.scale, torch.amp.GradScaler.step,
        iterator["__next__"], iterator["_next_index"], nn.Module.eval, nn.Module.zero_grad, torch.cuda.empty_cache,
        type(module._global_forward_pre_hooks), dict(optim._global_optimizer_pre_hooks), torch.is_anomaly_enabled(),
    ]


def train():
    torch.manual_seed(1)
    model, optimizer = make()
    for (x,) in DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = model(nn.functional.dropout(x)).square().mean()
        loss.backward()
        utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [tensor.tolist() for tensor in model.parameters()] + [torch.rand(1).item()]


before = of_torch()
plain = train()
with torchmedic.watch() as watch:
    watched = train()
assert watched == plain
assert of_torch() == before
assert torchmedic.watch(train)() == plain
print(watch.run, watch.diagnoses)

model, optimizer = make()  # only a part of the loop is in the block: nothing is wrong with what cannot be seen
for index in range(30):
    with torchmedic.watch():
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@torchmedic.watch
def step(model, optimizer):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


for index in range(30):
    optimizer.zero_grad()
    step(model, optimizer)
assert of_torch() == before
for end in (KeyboardInterrupt(), SystemExit(0), KeyError("a plain mistake")):
    try:
        with torchmedic.watch():
            raise end
    except BaseException as error:
        assert error is end
"""
)


def test_a_healthy_block_says_nothing_and_is_bit_identical(tmp_path: Path) -> None:
    finished = run_plain(tmp_path, HEALTHY)

    assert (finished.returncode, finished.stderr) == (0, ""), finished.stderr
    assert finished.stdout.strip() == f"{finished.run} ()"
    assert len(os.listdir(tmp_path / ".torchmedic")) == 2  # one run, and .gitignore
    assert [(found.code, found.in_traceback) for found in finished.report.diagnoses] == [("TM900", True)]
    outcome = finished.report.outcome
    assert (outcome.exit_status, outcome.steps) == (1, 24 + 24 + 30 + 30)


SILENT = (
    START
    + """
from torch.utils.data import DataLoader, Dataset


@torchmedic.watch(output="first", ignore=["TM601"])
def never_cleared(model, optimizer):
    for index in range(12):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


@torchmedic.watch(output="fourth")
def epoch(model, optimizer, number):
    for index in range(10):
        optimizer.zero_grad()
        x = torch.ones(8, 4)
        x[3] = number != 3 or index != 4
        (model(x) / x.norm(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()


@torchmedic.watch(output="second", format="concise")
def divides_by_zero(model, optimizer):
    for index in range(4):
        optimizer.zero_grad()
        x = torch.ones(8, 4)
        x[3] = index != 2
        loss = (model(x) / x.norm(dim=1, keepdim=True)).square().mean()  # <- cause
        loss.backward()
        optimizer.step()


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise KeyError("a missing sample")
        return torch.ones(4)


@torchmedic.watch
async def loads():
    for x in DataLoader(Data(), batch_size=2, num_workers=1):
        pass


@torchmedic.watch(output="third")
def one_by_one(layer):
    yield layer(torch.ones(2, 4))
    yield layer(torch.ones(2, 5))


never_cleared(*make())
trained = make()
for number in range(5):
    epoch(*trained, number)
divides_by_zero(*make())
try:
    loads().send(None)
except KeyError:
    pass
try:
    list(one_by_one(nn.Linear(4, 1)))
except RuntimeError as error:
    print([frame.name for frame in traceback.extract_tb(error.__traceback__)][:2])
"""
)


def test_each_way_to_use_it_and_each_setting(tmp_path: Path) -> None:
    finished = run_plain(tmp_path, SILENT)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "['<module>', 'one_by_one']\n"
    codes = {
        path.parent.name: [found["code"] for found in json.loads(path.read_text())["diagnoses"]]
        for path in [*tmp_path.glob("*/report.json"), finished.run / "report.json"]
    }
    assert codes == {
        "first": [],
        "second": ["TM201"],
        "third": ["TM151"],
        "fourth": ["TM201"],
        finished.run.name: ["TM820"],
    }, finished.stderr
    assert "TM601" not in finished.stderr
    assert f"\ntrain.py:{marked_line(SILENT)}:" in finished.stderr  # concise
    assert "first non-finite value, step 34, row 3" in finished.stderr  # brief parts count on


CAUGHT = (
    START
    + """
import gc
import weakref

from torchmedic.observe import lifecycle

gc.collect()
gc.disable()
seen = []


def fails(ask):
    model, optimizer = make()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    x = torch.randn(2, 5)
    seen.extend(map(weakref.ref, (model, x)))
    try:
        model(x)
    except RuntimeError as error:
        if not ask:
            raise
        print(torchmedic.diagnose(error).code)


with torchmedic.watch() as watch:
    fails(ask=True)
    print(lifecycle.current().clock.box is not None, lifecycle.current().clock.step)
    fails(ask=True)
    print(lifecycle.current().clock.updates, watch.diagnoses)
try:
    with torchmedic.watch():
        fails(ask=False)
except RuntimeError:
    pass
print([reference() for reference in seen])
"""
)


def test_what_was_examined_is_let_go_and_the_watch_goes_on(tmp_path: Path) -> None:
    finished = run_plain(tmp_path, CAUGHT)

    expected = ["TM151", "True 1", "TM151", "2 ()", "[None, None, None, None, None, None]"]
    assert finished.stdout.splitlines() == expected, finished.stderr


@pytest.mark.parametrize(
    "hook", ["session.begin", "session.failed", "session.look", "session.conclude", "session.publish"]
)
def test_a_fault_of_ours_is_contained(tmp_path: Path, hook: str) -> None:
    finished = run_plain(tmp_path, FAILING.replace("torchmedic.diagnose(error)", "None"), TORCHMEDIC_INJECT_FAULT=hook)

    assert json.loads(finished.stdout.splitlines()[0])["frames"][0] == "<module>", finished.stderr
    mentions = [line for line in finished.stderr.splitlines() if line.startswith("torchmedic: a fault of its own")]
    assert len(mentions) == 1, finished.stderr
    assert "injected fault" in mentions[0]


def test_under_run_the_parent_reports(tmp_path: Path) -> None:
    finished = run_script(tmp_path, FAILING)

    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("error[TM102]") == 1, finished.stderr
    assert finished.only.code == "TM102"
    assert not (tmp_path / ".torchmedic").exists()
