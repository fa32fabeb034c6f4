"""Checks of what a forked process inherits and cannot use: CUDA, the parent's OpenMP threads, held locks."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from torchmedic.supervise.preflight.children import Function, children, forked_loaders, run_by_workers
from torchmedic.supervise.preflight.constants import Constants, name_of
from torchmedic.supervise.preflight.facts import ScriptFacts
from torchmedic.supervise.preflight.finding import Finding, Situation, ok, warn

_COMPUTES = frozenset("backward matmul mm bmm conv1d conv2d einsum linear cross_entropy mse_loss softmax".split())
_MAKES = frozenset("randn rand zeros ones empty arange".split())
_MIN_PARALLEL_ELEMENTS = 32768  # from this size torch uses several threads for a tensor
_LOCKS = frozenset({"Lock", "RLock"})


def check(situation: Situation) -> Iterator[Finding]:
    if situation.script is not None:
        yield _cuda(situation.script, situation)
        yield _openmp(situation.script)
        yield _locks(situation.script)


def _cuda(script: ScriptFacts, situation: Situation) -> Finding:
    name = "CUDA after fork"
    here = situation.torch is not None and situation.torch.available
    for child in children(script):
        used = next((node for node in child.above if _uses_cuda(node, script.constants)), None)
        again = next((node for node in ast.walk(child.function) if _uses_cuda(node, script.constants)), None)
        if child.start == "fork" and used is not None and again is not None:
            at = child.source.at
            return warn(
                name,
                f"{at(child.call)} forks a process that uses CUDA ({at(again)}), and {at(used)} has used it before: "
                "it cannot be used again in a forked process",
                "start processes by spawn: torch.multiprocessing.set_start_method('spawn')",
            )
    forked = forked_loaders(script)
    for source, function in run_by_workers(script, forked) if forked else ():
        for node in ast.walk(function):
            sure = _uses_cuda(node, script.constants)
            if sure or (sure is None and here):
                return warn(
                    name,
                    f"{source.at(node)} uses CUDA in `{function.name}`, which runs in the {forked[0].workers} forked "
                    f"workers of {forked[0].place}: where the parent has used CUDA, they cannot",
                    "move the batch in the training loop, or give DataLoader multiprocessing_context='spawn'",
                )
    return ok(name, "no forked process was seen to use CUDA")


def _uses_cuda(node: ast.AST, constants: Constants) -> bool | None:
    """Whether a node uses CUDA; None if it does so only where CUDA is available."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and len(node.args) < 2:
        return True
    words = [word.value for word in node.keywords if word.arg == "device"]
    places = [*words, *(node.args[:1] if isinstance(node.func, ast.Attribute) and node.func.attr == "to" else ())]
    found: bool | None = False
    for place in places:
        known, meant = constants.known(place), constants.expression(place)
        if known is not None:
            found = found or str(known).startswith("cuda")
        elif meant is not place and meant is not None and "cuda" in ast.unparse(meant):
            found = found or None
    return found


def _openmp(script: ScriptFacts) -> Finding:
    """Find a child that is forked after its parent has computed: it waits for OpenMP threads that were not forked."""
    name = "OpenMP after fork"
    for child in children(script):
        computed = next(filter(_computes, child.above), None)
        if child.start == "fork" and computed is not None and _computes_alone(child.function, script.constants):
            at, function = child.source.at, child.function.name
            return warn(
                name,
                f"{at(child.call)} forks a process that computes in `{function}`, and {at(computed)} has computed "
                "before: the OpenMP threads that it waits for are not forked with it",
                f"call torch.set_num_threads(1) first in `{function}`, or start processes by spawn",
            )
    return ok(name, "no process was seen that is forked after torch has computed")


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COMPUTES


def _computes_alone(function: Function, constants: Constants) -> bool:
    """Whether a function computes with several threads: by an operation that uses them, or with large tensors."""
    nodes = list(ast.walk(function))
    if any(name_of(node) == "set_num_threads" for node in nodes):
        return False
    return any(_computes(node) or _is_large(node, constants) for node in nodes)


def _is_large(node: ast.AST, constants: Constants) -> bool:
    if not (isinstance(node, ast.Call) and name_of(node) in _MAKES and node.args):
        return False
    sizes = [constants.known(each) for each in node.args]
    sizes = sizes[0] if isinstance(sizes[0], list) else sizes
    return all(isinstance(each, int) for each in sizes) and math.prod(sizes) > _MIN_PARALLEL_ELEMENTS


def _locks(script: ScriptFacts) -> Finding:
    """Find a lock that a thread may hold while workers are forked: it stays locked in them forever."""
    name = "locks after fork"
    locks = {
        name_of(target)
        for source in script.sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and name_of(node.value) in _LOCKS
        for target in node.targets
    } - {""}
    forked = forked_loaders(script) if locks else []
    for thread in children(script, "Thread"):
        later = [loader for loader in forked if loader.source is thread.source]
        later = [loader for loader in later if loader.call.lineno > thread.call.lineno]
        held = _taken(thread.function) & locks
        for source, function in run_by_workers(script, later) if later and held else ():
            for lock in _taken(function) & held:
                return warn(
                    name,
                    f"`{function.name}` ({source.at(function)}) takes `{lock}` in the forked workers of "
                    f"{later[0].place}, and the thread of {source.at(thread.call)} may hold it when they are forked",
                    "start the thread after the workers, or give DataLoader multiprocessing_context='spawn'",
                )
    return ok(name, "no lock was seen that a thread can hold while workers are forked")


def _taken(function: Function) -> set[str]:
    """Names of the locks that a function takes by `with` or `acquire()`."""
    taken = set()
    for node in ast.walk(function):
        if isinstance(node, ast.With):
            taken |= {name_of(item.context_expr) for item in node.items}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "acquire":
            taken.add(name_of(node.func.value))
    return taken - {""}
