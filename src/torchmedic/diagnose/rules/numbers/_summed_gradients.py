"""Gradients or weights that are added over all ranks by hand, and that nothing divides by the number of ranks."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from torch.optim import SGD

from torchmedic.errors import UnreadableRun
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog
from torchmedic.runfolder import layout, ring
from torchmedic.source.branches import nodes_around
from torchmedic.source.syntax import callee, calls_in, has_line, nodes_in, syntax_tree

_SUM = "all_reduce"
_MIN_CALLS = 2
_SCALES = frozenset({"div", "div_", "mul", "mul_", "true_divide", "divide", "divide_", "mean", "_foreach_div_"})
_WEIGHTS = frozenset({"data", "parameters", "named_parameters", "state_dict", "detach"})
_OF_JOB = re.compile(r"world|size|ranks?\b|nprocs|gpus|devices|workers", re.IGNORECASE)


class Sum(NamedTuple):
    """Where the gradients, or the weights, of all ranks are added, and how many ranks there are."""

    line: StackFrame
    ranks: int
    of: Literal["gradients", "weights"]


def summed(evidence: NumbersEvidence) -> Sum | None:
    """The only line that adds them; None where anything near it divides, or divides by a number of ranks."""
    log = _own_log(evidence.agent.run)
    if log is None or log.world_size < 2:
        return None
    calls = [call for call in log.calls if call.op == _SUM and call.frames and not call.native]
    lines = dict.fromkeys(call.frames[0] for call in _of_gradients(calls, evidence))
    line = next(iter(lines), None)
    files = {frame.file for call in calls for frame in call.frames}
    is_only = line is not None and len(lines) == 1 and _adds(line) and not any(map(_divides_by_ranks, files))
    if line is None or not is_only:
        return None
    if _is_about_weights(line):
        return Sum(line, log.world_size, "weights")
    is_plain = all(type(each) is SGD for each in evidence.incident.optimizers)
    return Sum(line, log.world_size, "gradients") if is_plain else None  # Adam divides a factor out again


def _own_log(run: Path) -> RankLog | None:
    """The collectives that this process has called."""
    for folder in layout.process_folders(run):
        with contextlib.suppress(UnreadableRun):
            log = ring.read(folder / ring.FILE)
            if log.pid == os.getpid():
                return log
    return None


def _of_gradients(calls: list[Collective], evidence: NumbersEvidence) -> list[Collective]:
    """The calls that have the shape of a gradient, or the size of all of them."""
    given = [each for each in parameters_of(*evidence.incident.optimizers) if each.requires_grad]
    shapes, size = {tuple(each.shape) for each in given if each.dim()}, sum(each.numel() for each in given)
    found = [call for call in calls if call.shapes and (call.shapes[0] in shapes or call.shapes[0] == (size,))]
    return found if len(found) >= _MIN_CALLS else []


def _is_about_weights(line: StackFrame) -> bool:
    """Whether the function of a line reads weights, and speaks of no gradient."""
    around = nodes_around(line.file, line.line)
    names = {name for node in ast.walk(around[0]) for name in (getattr(node, "attr", ""), getattr(node, "id", ""))}
    return bool(names & _WEIGHTS) and not any("grad" in name for name in names)


def _adds(line: StackFrame) -> bool:
    """Whether a line adds, and nothing in its function divides or multiplies."""
    calls = [node for node in calls_in(syntax_tree(line.file), _SUM) if has_line(node, line.line)]
    around = nodes_around(line.file, line.line)
    if len(calls) != 1 or not around:
        return False
    given = [*calls[0].args[1:2], *(word.value for word in calls[0].keywords if word.arg == "op")]
    is_sum = all(ast.unparse(each).endswith("SUM") for each in given)
    return is_sum and not any(True for _ in _divisors(ast.walk(around[0])))


def _divides_by_ranks(file: str) -> bool:
    found = _divisors(nodes_in(syntax_tree(file)))
    return any(_OF_JOB.search(ast.unparse(each)) for each in found)


def _divisors(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """What is divided by, and what is passed to calls that divide or multiply."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
            yield node.value
        elif isinstance(node, ast.Call) and callee(node) in _SCALES:
            yield node
