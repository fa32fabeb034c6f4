"""Run a training script on a pretended card until every optimizer has stepped twice."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchmedic.fit.cards import Card
from torchmedic.fit.changes import Change, Literal, applied
from torchmedic.fit.fake_device import pretended
from torchmedic.fit.machine import Ended, Machine
from torchmedic.fit.modules import cuda_kernels, faked_modules
from torchmedic.fit.steps import Done, Steps
from torchmedic.records.fit import Trace
from torchmedic.replay.isolation.torch_state import replaced
from torchmedic.source.user_code import is_user_file

_QUIET = {
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:///dev/null",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def trace_script(script: Path, arguments: tuple[str, ...], card: Card, change: Change, seconds: float) -> Trace:
    """Run the script and follow its memory. The process cannot be used for anything else afterwards."""
    os.environ.update(_QUIET)
    given = arguments if change.arguments is None else change.arguments
    sys.argv[:] = [str(script), *given]
    sys.path.insert(0, str(script.resolve().parent))
    source = script.read_bytes()

    def run(_: Machine) -> None:
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(script), __builtins__=__builtins__)
        sys.modules["__main__"] = main
        tree = ast.parse(source, str(script))
        for literal in change.literals:
            tree = _exchanged(tree, literal)
        exec(compile(tree, str(script), "exec"), main.__dict__)

    trace = followed(run, card, change, seconds)
    if not trace.error and not _on_device(trace):
        trace = followed(run, card, change, seconds, adopt=True)
    return trace


def followed(
    run: Callable[[Machine], Any], card: Card, change: Change, seconds: float, *, adopt: bool = False
) -> Trace:
    """Follow the memory of some code until every optimizer has stepped twice."""
    machine = Machine(card, time.monotonic() + seconds, adopt=adopt)
    steps = Steps(machine)
    trace = machine.trace
    with _surroundings(machine, steps, card, change):
        try:
            with machine:
                run(machine)
        except Ended:
            pass
        except SystemExit as ending:
            if ending.code not in (None, 0):
                trace.error = f"the script ended with status {ending.code!r} before its second step"
        except BaseException as error:
            trace.error = said(error)
        if isinstance(machine.ended, Done):
            trace.error = ""
            return trace
        if machine.ended is not None:
            trace.error = f"the first two steps took longer than {seconds:.0f} s"
        if not trace.error and not trace.steps:
            trace.error = "there is no training step: no optimizer of torch.optim stepped"
        elif not trace.error:
            trace.seconds = machine.clock.seconds
            steps.finish()
            if trace.steps == 1:
                trace.notes.append("the code takes one step: a second step may need more, as gradients and state exist")
    return trace


def said(error: BaseException) -> str:
    """An error in one line, with the innermost line of the user."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((each for each in reversed(frames) if is_user_file(each.filename)), None)
    text = (str(error).strip().splitlines() or [""])[0]
    at = f" at {os.path.relpath(line.filename)}:{line.lineno}" if line is not None else ""
    return f"{type(error).__name__}{at}: {text}" if text else f"{type(error).__name__}{at}"


@contextlib.contextmanager
def _surroundings(machine: Machine, steps: Steps, card: Card, change: Change) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended(card))
        stack.enter_context(cuda_kernels())
        stack.enter_context(host_values())
        stack.enter_context(faked_modules(machine, change))
        stack.enter_context(steps.counted())
        stack.enter_context(applied(change, machine))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def _on_device(trace: Trace) -> bool:
    return bool(trace.sizes)


def _exchanged(tree: ast.Module, literal: Literal) -> ast.Module:
    for node in ast.walk(tree):
        at = (getattr(node, "lineno", 0), getattr(node, "col_offset", -1))
        if isinstance(node, ast.Constant) and at == (literal.line, literal.column):
            node.value = literal.value
    return tree


def _numpy(tensor: torch.Tensor) -> Any:
    import numpy

    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return numpy.zeros(tuple(tensor.shape), dtype=str(dtype).removeprefix("torch."))


def _tolist(tensor: torch.Tensor) -> Any:
    def nested(shape: tuple[int, ...]) -> Any:
        return value if not shape else [nested(shape[1:]) for _ in range(shape[0])]

    value = True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    return nested(tuple(tensor.shape))


def _format(tensor: torch.Tensor, spec: str = "") -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else repr(tensor)


def _for_fakes(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, *args, **kwargs)
        return _format(self, *args) if name == "__format__" else answer(self)

    return method


@contextlib.contextmanager
def host_values() -> Iterator[None]:
    """Let code of the host read fake tensors, and let nothing be written to files, until the end of the block."""
    answers = {
        "numpy": _numpy,
        "__array__": _numpy,
        "tolist": _tolist,
        "__format__": _format,
        "data_ptr": lambda tensor: id(tensor.untyped_storage()),
        "share_memory_": lambda tensor: tensor,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(replaced(torch.Tensor, name, _for_fakes(name, answer)))
        stack.enter_context(replaced(torch, "save", lambda *args, **kwargs: None))
        yield
