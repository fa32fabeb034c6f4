"""Checks of what a forked process inherits and cannot use: CUDA, and the OpenMP threads of its parent."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.supervise.preflight.constants import Constants, Unknown, name_of
from torchmedic.supervise.preflight.facts import Loader, ScriptFacts
from torchmedic.supervise.preflight.finding import Finding, Situation, ok, warn
from torchmedic.supervise.preflight.sources import Source

_FETCHES = ("__getitem__", "__getitems__", "__iter__", "__next__")
_COMPUTES = frozenset("backward matmul mm bmm conv1d conv2d einsum linear cross_entropy mse_loss softmax".split())
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(situation: Situation) -> Iterator[Finding]:
    if situation.script is not None:
        yield _cuda_in_workers(situation.script, situation)
        yield _openmp_after_fork(situation.script)


def _cuda_in_workers(script: ScriptFacts, situation: Situation) -> Finding:
    found = _cuda_after_fork(script, script.constants)
    if found is not None:
        return found
    forked = [loader for loader in script.loaders if loader.workers and loader.start == "fork"]
    if not forked:
        return ok("CUDA in workers", "no forked workers can be seen in the script")
    for source, function in _run_by_workers(script, forked):
        for node in ast.walk(function):
            sure = _uses_cuda(node, script.constants)
            if sure or (sure is None and situation.torch is not None and situation.torch.available):
                return warn(
                    "CUDA in workers",
                    f"{source.at(node)} uses CUDA in `{function.name}`, which runs in the {forked[0].workers} forked "
                    f"workers of {forked[0].place}: where the parent has used CUDA, they cannot",
                    "move the batch in the training loop, or give DataLoader multiprocessing_context='spawn'",
                )
    return ok("CUDA in workers", "nothing that runs in forked workers was seen to use CUDA")


def _run_by_workers(script: ScriptFacts, loaders: list[Loader]) -> Iterator[tuple[Source, _Function]]:
    """Functions of the script that its workers call: of the datasets, and those that DataLoader was given."""
    kinds = {_class_of(loader.arguments.get("dataset"), script.constants) for loader in loaders}
    given = {
        name_of(loader.arguments[word])
        for loader in loaders
        for word in ("collate_fn", "worker_init_fn")
        if word in loader.arguments
    }
    classes = {
        node.name for source in script.sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    }
    for source in script.sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and (node.name in kinds or not kinds <= classes):
                yield from (
                    (source, each) for each in node.body if isinstance(each, _Function) and each.name in _FETCHES
                )
            elif isinstance(node, _Function) and node.name in given:
                yield source, node


def _class_of(dataset: ast.expr | None, constants: Constants) -> str:
    made = constants.expression(dataset)
    return name_of(made) if isinstance(made, ast.Call) else ""


def _uses_cuda(node: ast.AST, constants: Constants) -> bool | None:
    """None for a device that is CUDA where there is one."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and len(node.args) < 2:
        return True
    words = [word.value for word in node.keywords if word.arg == "device"]
    places = [*words, *(node.args[:1] if isinstance(node.func, ast.Attribute) and node.func.attr == "to" else ())]
    found: bool | None = False
    for place in places:
        try:
            found = found or str(constants.value(place)).startswith("cuda")
        except Unknown:
            meant = constants.expression(place)
            if meant is not place and meant is not None and "cuda" in ast.unparse(meant):
                found = found or None
    return found


def _cuda_after_fork(script: ScriptFacts, constants: Constants) -> Finding | None:
    for source, call, function, before in _forks(script):
        used = next((node for node in before if _uses_cuda(node, constants)), None)
        again = next((node for node in ast.walk(function) if _uses_cuda(node, constants)), None)
        if used is not None and again is not None:
            return warn(
                "CUDA in workers",
                f"{source.at(call)} forks a process that uses CUDA ({source.at(again)}), and {source.at(used)} "
                "has used it before: it cannot be used again in a forked process",
                "start processes by spawn: torch.multiprocessing.set_start_method('spawn')",
            )
    return None


def _openmp_after_fork(script: ScriptFacts) -> Finding:
    """A child that is forked after its parent has computed waits for OpenMP threads that were not forked with it."""
    for source, call, function, before in _forks(script):
        computed = next(filter(_computes, before), None)
        if computed is not None and _computes_alone(function):
            return warn(
                "OpenMP after fork",
                f"{source.at(call)} forks a process that computes in `{function.name}`, and {source.at(computed)} "
                "has computed before: the OpenMP threads that it waits for are not forked with it",
                f"call torch.set_num_threads(1) first in `{function.name}`, or start processes by spawn",
            )
    if script.start != "fork":
        return ok("OpenMP after fork", f"processes are started by {script.start}")
    return ok("OpenMP after fork", "no process was seen that is forked after torch has computed")


def _forks(script: ScriptFacts) -> Iterator[tuple[Source, ast.Call, _Function, list[ast.AST]]]:
    """Processes that are forked to run a function of the same file, and what stands above that is not theirs."""
    if script.start != "fork":
        return
    for source in script.sources:
        functions = {node.name: node for node in ast.walk(source.tree) if isinstance(node, _Function)}
        targets: dict[int, _Function] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and name_of(node) == "Process" and not _has_context(node):
                target = next((word.value for word in node.keywords if word.arg == "target"), None)
                if target is not None and name_of(target) in functions:
                    targets[id(node)] = functions[name_of(target)]
        theirs = {id(node) for function in targets.values() for node in ast.walk(function)}
        above: list[ast.AST] = []
        for node in _in_order(source.tree) if targets else ():
            if isinstance(node, ast.Call) and id(node) in targets:
                yield source, node, targets[id(node)], above
            elif id(node) not in theirs:
                above.append(node)


def _has_context(call: ast.Call) -> bool:
    """`context.Process(...)`: what the context is decides, and that is not seen here."""
    return isinstance(call.func, ast.Attribute) and name_of(call.func.value) not in ("mp", "multiprocessing")


def _in_order(tree: ast.AST) -> list[ast.AST]:
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COMPUTES


def _computes_alone(function: _Function) -> bool:
    """Whether a function computes with a team of threads."""
    nodes = list(ast.walk(function))
    return any(map(_computes, nodes)) and not any(name_of(node) == "set_num_threads" for node in nodes)
