"""A step is cut from a live frame and runs again to the same end, whatever Python it is written in."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.replay.isolation.sandbox import ReplayTooBig, ReplayTooLong, time_limit
from torchmedic.replay.step.step import Step, from_traceback
from torchmedic.source import user_code as frame_kinds
from torchmedic.source.segment.cut import CannotCut

BOOM = "element 0 of tensors does not require grad"


class Case:
    """A script that ends in an exception inside its step, with the agent that would have watched it."""

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / "train.py"
        self.path.write_text("import torch\nfrom torch import nn\n\n" + textwrap.dedent(source))
        linecache.checkcache()
        frame_kinds._known.clear()
        self.namespace: dict[str, Any] = {"__name__": "train", "__file__": str(self.path)}
        self.notes = StepNotes()
        self.agent = SimpleNamespace(
            notes=self.notes, clock=SimpleNamespace(optimizers=[], usual_step=0.0), batches=SimpleNamespace(whole=None)
        )
        self.namespace["notes"] = self.notes
        self.error: BaseException | None = None

    def run(self) -> Step:
        try:
            exec(compile(self.path.read_text(), str(self.path), "exec"), self.namespace)
        except RuntimeError as error:
            self.error = error
            tb = error.__traceback__
            assert tb is not None
            return from_traceback(tb.tb_next, self.agent)
        raise AssertionError("the script was meant to fail")


@pytest.fixture
def case(tmp_path: Path) -> Any:
    return lambda source: Case(tmp_path, source)


SHAPES = {
    "module level loop": """
        w = torch.ones(3, requires_grad=True)
        for i in range(4):
            x = torch.full((3,), float(i))
            loss = (w * x).sum()
            if i == 2:
                loss = loss.detach()
            loss.backward()
        """,
    "function with early return": """
        def step(x, w):
            if x.sum() < 0:
                return None
            loss = (x * w).sum().detach()
            return loss.backward()
        step(torch.ones(2), torch.ones(2, requires_grad=True))
        """,
    "continue and break in the body": """
        w = torch.ones(2, requires_grad=True)
        def fit():
            for i in range(5):
                if i < 3:
                    continue
                if i > 4:
                    break
                loss = (w * i).sum().detach()
                loss.backward()
        fit()
        """,
    "zero-argument super and mangled names": """
        class Base:
            def scale(self):
                return 2.0
        class Trainer(Base):
            def __init__(self):
                self.__w = torch.ones(2, requires_grad=True)
            def step(self):
                loss = (self.__w * super().scale()).sum().detach()
                loss.backward()
        Trainer().step()
        """,
    "closure over nonlocal": """
        def make():
            count = 0
            w = torch.ones(2, requires_grad=True)
            def step():
                nonlocal count
                count += 1
                loss = (w * count).sum().detach()
                loss.backward()
            return step
        make()()
        """,
    "generator": """
        def batches(w):
            for i in range(3):
                loss = (w * i).sum().detach()
                loss.backward()
                yield loss
        for loss in batches(torch.ones(2, requires_grad=True)):
            pass
        """,
    "walrus and comprehension": """
        w = torch.ones(2, requires_grad=True)
        def step(items):
            if (n := len(items)) > 1:
                x = torch.stack([torch.full((2,), float(item)) for item in items])
                loss = (x @ w / n).sum().detach()
                loss.backward()
        step([1, 2, 3])
        """,
    "with blocks around and inside": """
        from contextlib import nullcontext
        w = torch.ones(2, requires_grad=True)
        with nullcontext():
            for i in range(3):
                with nullcontext() as nothing, torch.enable_grad():
                    loss = (w * 2).sum()
                    with torch.no_grad():
                        loss = loss * 1.0
                    loss.backward()
        """,
    "try and except": """
        w = torch.ones(2, requires_grad=True)
        def step():
            try:
                loss = (w * 3).sum().detach()
                loss.backward()
            except ValueError:
                pass
            finally:
                done = True
        step()
        """,
    "decorated method": """
        import functools
        def timed(f):
            @functools.wraps(f)
            def inner(*args):
                return f(*args)
            return inner
        class T:
            w = torch.ones(2, requires_grad=True)
            @timed
            def step(self, k):
                loss = (self.w * k).sum().detach()
                loss.backward()
        T().step(3)
        """,
    "async": """
        import asyncio
        w = torch.ones(2, requires_grad=True)
        async def batch():
            return torch.full((2,), 3.0)
        async def train():
            for i in range(2):
                x = await batch()
                loss = (w * x).sum().detach()
                loss.backward()
        asyncio.run(train())
        """,
    "several statements on a line": """
        w = torch.ones(2, requires_grad=True); seen = []
        for i in range(3):
            loss = (w * i).sum().detach(); seen.append(i); loss.backward(); w = None
        """,
    "match statement": """
        w = torch.ones(2, requires_grad=True)
        def step(kind):
            match kind:
                case "a":
                    loss = w.sum()
                case _:
                    loss = w.sum().detach()
            loss.backward()
        step("b")
        """,
    "lambda loss and keyword arguments": """
        w = torch.ones(2, requires_grad=True)
        criterion = lambda *, out, target: ((out - target) ** 2).mean()
        def step(*, target):
            loss = criterion(out=w.detach() * 2, target=target)
            loss.backward()
        step(target=torch.zeros(2))
        """,
}


@pytest.mark.parametrize("source", SHAPES.values(), ids=SHAPES.keys())
def test_the_step_fails_again_in_the_same_way(case: Any, source: str) -> None:
    failing = case(source)

    step = failing.run()
    played = step.runner.play()

    assert BOOM in str(failing.error)
    assert played.error is not None
    assert BOOM in str(played.error)
    assert len(played.roots) == 1


def test_bookkeeping_is_not_repeated(case: Any) -> None:
    failing = case("""
        w = torch.ones(2, requires_grad=True); log = []; total = 0.0
        for i in range(3):
            loss = (w * i).sum()
            log.append(loss.item())
            total += loss.item()
            print("never again")
            if i == 1:
                loss = loss.detach()
            loss.backward()
        """)
    step = failing.run()

    step.runner.play()

    assert failing.namespace["log"] == [0.0, 2.0]
    assert failing.namespace["total"] == 2.0


def test_state_is_put_back(case: Any) -> None:
    failing = case("""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        notes.step_begins(None)
        x = torch.randn(4, 3)
        model(x).sum().backward()
        loss = model(x).sum().detach()
        loss.backward()
        """)
    step = failing.run()
    model = failing.namespace["model"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in gradients]
    rng = torch.get_rng_state()

    step.runner.play()

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))
    assert torch.equal(rng, torch.get_rng_state())


def test_random_numbers_are_drawn_again(case: Any) -> None:
    failing = case("""
        torch.manual_seed(5)
        w = torch.ones(3, requires_grad=True)
        notes.step_begins(None)
        x = torch.randn(3)
        loss = (w * x).sum().detach()
        loss.backward()
        """)
    step = failing.run()

    assert step.settle([failing.namespace["loss"]])


def test_data_drawn_before_the_notes_is_taken_over(case: Any) -> None:
    failing = case("""
        w = torch.ones(3, requires_grad=True)
        def step():
            x = torch.randn(3)
            loss = (w * x).sum().detach()
            loss.backward()
        step()
        """)
    step = failing.run()
    original = failing.error.__traceback__.tb_next.tb_next.tb_frame.f_locals["loss"]

    assert step.settle([original])


def test_an_optimizer_step_in_the_segment_changes_no_weight(case: Any) -> None:
    failing = case("""
        w = torch.ones(3, requires_grad=True)
        opt = torch.optim.SGD([w], lr=1.0)
        def train():
            for i in range(2):
                a = (w * w).sum()
                a.backward()
                opt.step()
                b = (w * 2).sum().detach()
                b.backward()
        train()
        """)
    step = failing.run()
    failing.agent.clock.optimizers.append(failing.namespace["opt"])
    step.runner._optimizers.append(failing.namespace["opt"])
    weights = failing.namespace["w"].detach().clone()

    step.runner.play()

    assert torch.equal(weights, failing.namespace["w"])
    assert "step" not in vars(failing.namespace["opt"])


def test_missing_source_is_said(case: Any) -> None:
    failing = case("""
        torch.ones(1).backward()
        """)
    failing.path.write_text("")
    linecache.clearcache()
    code = compile("def step():\n    torch.ones(1).backward()\nstep()", str(failing.path), "exec")
    tb = None
    try:
        exec(code, {"torch": torch})
    except RuntimeError as error:
        tb = error.__traceback__
    linecache.clearcache()

    with pytest.raises(CannotCut, match="is missing"):
        from_traceback(tb.tb_next if tb is not None else None, failing.agent)


def test_a_replay_that_only_waits_ends_in_time(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = case("""
        w = torch.ones(2, requires_grad=True)
        ready = [True]
        def step():
            while not ready:  # for ever, the second time
                pass
            ready.clear()
            w.sum().detach().backward()
        step()
        """)
    step = failing.run()
    monkeypatch.setattr(step.runner, "_seconds", 0.1)

    assert isinstance(step.runner.play().error, ReplayTooLong)


def test_a_loader_that_a_replay_begins_to_read_has_an_end_and_no_workers(case: Any) -> None:
    failing = case("""
        import multiprocessing, os
        data = torch.utils.data.TensorDataset(torch.ones(6, 2))
        w = torch.ones(2, requires_grad=True)
        def fit():
            rows = workers = 0
            for (x,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True):
                rows = rows + len(x)
                workers = max(workers, len(multiprocessing.active_children()))
            (w * x).sum().detach().backward()
        fit()
        """)
    step = failing.run()
    assert (step.frame.f_locals["rows"], step.frame.f_locals["workers"]) == (6, 2)
    step.runner._batch = (torch.ones(2, 2),)

    played = step.runner.play()

    assert BOOM in str(played.error)
    assert played.namespace["rows"] == 6
    assert played.namespace["workers"] <= 2  # those of the loader before, if any


def test_a_replay_ends_in_time(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = case("""
        w = torch.ones(2, requires_grad=True)
        def step(n):
            for i in range(n):
                w + i
            loss = w.sum().detach()
            loss.backward()
        step(3)
        """)
    step = failing.run()
    monkeypatch.setattr(step.runner, "_seconds", -1.0)

    played = step.runner.play()

    assert isinstance(played.error, ReplayTooLong)


def test_a_replay_does_not_use_up_the_memory(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = case("""
        torch.ones(2).sum().backward()
        """)
    step = failing.run()
    monkeypatch.setattr("torchmedic.replay.isolation.sandbox._MIN_FREE_HOST", 1.1)

    assert isinstance(step.runner.play().error, ReplayTooBig)


def test_the_time_limit_follows_the_usual_step() -> None:
    assert time_limit(0.001) == 15.0
    assert time_limit(2.0) == 40.0
    assert time_limit(60.0) == 120.0
