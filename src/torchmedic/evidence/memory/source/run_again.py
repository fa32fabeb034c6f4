"""Whether a loop that is running now comes by a line again: it stands in it, or in a function that it leads to.

A data set in memory is filled once, before the loop; a container that the loop fills has no end. Names decide: of the
functions that the loop calls, those that these call, the hooks of modules, and methods that Python calls by itself.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import (
    FUNCTIONS,
    LOOPS,
    callee,
    calls_in,
    first_line,
    has_line,
    innermost,
    nodes_in,
    syntax_tree,
)
from torchmedic.source.user_variables import loaded_files

_UNSEEN = frozenset("forward __call__ __getitem__ __getitems__ __next__".split())  # called without their names
_LOADING = os.path.join("torch", "utils", "data", "_utils", "")
_BATCHES = (_LOADING + "worker.py", _LOADING + "fetch.py")  # which ask for batch after batch
_ONCE = frozenset({"__init__", "__iter__"})  # which it does not call for each of them
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_run_again(filler: Filler, frames: Sequence[Frame], modules: Iterable[torch.nn.Module] = ()) -> bool:
    """Whether a loop that the failure came out of leads to this line."""
    around = _functions_around(filler.file, filler.node.lineno)
    calls: dict[str, set[str]] | None = None
    for position, frame in enumerate(frames):
        if frame.file.endswith(_BATCHES):
            under_way = {inner.function for inner in frames[position + 1 :] if inner.is_user} - _ONCE
            under_way |= _name_of(frame.variables.get("collate_fn"))
            if not around.isdisjoint(under_way | _reached(under_way | _UNSEEN, _calls(frames))):
                return True
        if not frame.is_user and not _is_torchs(frame):
            # A trainer of a library, which calls what it was given in a loop of its own.
            under_way = {inner.function for inner in frames[position + 1 :] if inner.file == filler.file}
            source = syntax_tree(frame.file, frame.live.f_globals)
            if not around.isdisjoint(under_way) and innermost(source, frame.line, LOOPS) is not None:
                return True
        tree = syntax_tree(frame.file, frame.live.f_globals) if frame.is_user else None
        for loop in nodes_in(tree):
            if not isinstance(loop, LOOPS) or not has_line(loop, frame.line):
                continue
            if filler.file == frame.file and has_line(loop, filler.node.lineno):
                return True
            under_way = {inner.function for inner in frames[position + 1 :] if inner.file == filler.file}
            if not around.isdisjoint(under_way):
                return True
            calls = _calls(frames) if calls is None else calls
            if not around.isdisjoint(_reached(_called(loop) | _UNSEEN | _hooks(modules), calls)):
                return True
    return False


def _is_torchs(frame: Frame) -> bool:
    """Whether a frame is torch's: its containers go through their layers in a loop, once in each step."""
    return str(frame.live.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _called(tree: ast.AST) -> set[str]:
    """The names that are called, and in quotes the texts that are handed on: `getattr(callback, "on_step")(out)`."""
    calls = list(calls_in(tree))
    names = {callee(each) for each in calls}
    texts = [value.value for each in calls for value in each.args if isinstance(value, ast.Constant)]
    return names | {f"'{text}" for text in texts if isinstance(text, str) and text.isidentifier()}


def _calls(frames: Sequence[Frame]) -> dict[str, set[str]]:
    """By the name of every function of the user's, and of every class: the names that it calls."""
    files = {*(frame.file for frame in frames if frame.is_user), *loaded_files()}
    found: dict[str, set[str]] = {}
    for tree in filter(None, map(syntax_tree, sorted(files))):
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                found.setdefault(node.name, set()).update(_called(node))
            elif isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, FUNCTIONS) and each.name == "__init__"]
                found.setdefault(node.name, set()).update(*map(_called, made))
    return found


def _reached(names: set[str] | frozenset[str], calls: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in reached and not (name.startswith("__") and name not in _UNSEEN):
            reached.add(name)
            pending += calls.get(name, ())
        if not pending and "getattr" in reached:
            pending = [each[1:] for each in reached if each.startswith("'") and each[1:] not in reached]
    return reached


def _hooks(modules: Iterable[torch.nn.Module]) -> set[str]:
    """The names of the functions that are called with what modules give."""
    hooks: list[Any] = []
    for module in modules:
        for kind in _HOOKS:
            hooks += (module.__dict__.get(kind) or {}).values()
    return set().union(*map(_name_of, hooks))


def _name_of(function: Any) -> set[str]:
    """The name of a function, also behind a `partial`; empty for what has no name."""
    return {str(getattr(getattr(function, "func", function), "__name__", ""))} - {""}


def _functions_around(file: str, line: int) -> set[str]:
    tree = syntax_tree(file)
    return {
        node.name
        for node in nodes_in(tree)
        if isinstance(node, FUNCTIONS) and first_line(node) <= line <= (node.end_lineno or node.lineno)
    }
