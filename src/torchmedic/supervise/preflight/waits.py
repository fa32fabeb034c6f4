"""Checks for endless waits that the source shows: a loader without batches, a join before its queue is emptied."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.supervise.preflight.children import Child, children, in_order
from torchmedic.supervise.preflight.constants import name_of
from torchmedic.supervise.preflight.facts import ScriptFacts, dataset_length
from torchmedic.supervise.preflight.finding import Finding, Situation, ok, warn


def check(situation: Situation) -> Iterator[Finding]:
    if situation.script is not None:
        yield _empty_loaders(situation.script)
        yield _joins(situation.script)


def _empty_loaders(script: ScriptFacts) -> Finding:
    for loader in script.loaders:
        length = dataset_length(loader, script.constants)
        drops = bool(script.constants.known(loader.arguments.get("drop_last")))
        if drops and length is not None and loader.batch_size is not None and length < loader.batch_size:
            return warn(
                "empty loaders",
                f"{loader.place} drops the last batch, and {length} samples make no whole batch of {loader.batch_size}",
                "a smaller batch_size, or drop_last=False",
            )
    return ok("empty loaders", "no DataLoader was seen that has no batch")


def _joins(script: ScriptFacts) -> Finding:
    """Check for a join before its queue is emptied: a process does not end while its queue still holds items."""
    for child in children(script):
        found = _joined_first(child)
        if found is not None:
            at, (join, queue) = child.source.at, found
            return warn(
                "queues",
                f"{at(join)} waits for the process of {at(child.call)} to end before `{queue}` is emptied: with more "
                "in it than a pipe holds (64 KiB), it does not end",
                f"take everything out of `{queue}` first, then join",
            )
    return ok("queues", "no process was seen to be joined before its queue is emptied")


def _joined_first(child: Child) -> tuple[ast.Call, str] | None:
    puts = {
        name_of(node.func.value)
        for node in ast.walk(child.function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "put"
    }
    queues = {ours for ours, theirs in child.arguments.items() if theirs in puts}
    process = _assigned_to(child)
    if not queues or not process:
        return None
    inside = {id(node) for node in ast.walk(child.function)}
    join: ast.Call | None = None
    for node in in_order(child.source.tree):
        if id(node) in inside or not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of = name_of(node.func.value)
        if node.func.attr == "join" and of == process and not node.args and not node.keywords:
            join = join or node
        elif node.func.attr in ("get", "get_nowait") and of in queues:
            return (join, of) if join is not None else None
    return None


def _assigned_to(child: Child) -> str:
    for node in child.above[::-1]:
        if isinstance(node, ast.Assign) and node.value is child.call:
            return name_of(node.targets[0])
    return ""
