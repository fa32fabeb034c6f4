"""Which line switched gradients off for the code that runs at a given line."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.records import Location
from torchmedic.replay.step import runner
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.syntax import FUNCTIONS, last_name, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import loaded_files, user_trees

_SWITCHES = ("grad_mode.py", "_contextlib.py", "contextlib.py")
_MODES = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


class Switch(NamedTuple):
    """The expression that switches gradients off."""

    file: str
    node: ast.expr
    is_block: bool  # the head of a `with`
    stays: bool  # nothing switches them on again

    def location(self) -> Location:
        text = "gradients are switched off here" + (", and stay off" if self.stays else "")
        return node_location("cause", self.file, self.node, text)


def where_switched_off(stack: Sequence[Spot], frames: Sequence[Frame], *, stays: bool) -> Switch | None:
    """The `with` block or decorator around one of these lines; if they stay off, a call that left them off for good."""
    places = [(spot.file, spot.line) for spot in stack] + [(frame.file, frame.line) for frame in reversed(frames)]
    for file, line in places:
        found = _around(file, line)
        if found is not None:
            return found
    if not stays:
        return None  # a function of a library's switches them off for its own time
    for file in dict.fromkeys([*(file for file, _ in places), *loaded_files()]):
        tree = syntax_tree(file) or ast.Module([], [])
        managed = set(map(id, _managed(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _switches_off(node) and id(node) not in managed:
                return Switch(file, node, is_block=False, stays=True)
    return None


def _around(file: str, line: int) -> Switch | None:
    best: Switch | None = None
    at = 0
    for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
        if not isinstance(node, ast.With | ast.AsyncWith | FUNCTIONS | ast.ClassDef):
            continue
        is_block = isinstance(node, ast.With | ast.AsyncWith)
        first = node.body[0].lineno if is_block else node.lineno
        if not first <= line <= (node.end_lineno or node.lineno):
            continue
        for head in _heads(node):
            switch = head if _switches_off(head) else _named_switch(file, head, node.lineno)
            if switch is not None and (best is None or head.lineno >= at):
                best, at = Switch(file, switch, is_block=is_block and switch is head, stays=False), head.lineno
    return best


def _named_switch(file: str, head: ast.expr, line: int) -> ast.expr | None:
    """`context = torch.no_grad() if ... else ...; with context:`: the call behind the name."""
    if not isinstance(head, ast.Name | ast.Attribute):
        return None
    name = ast.unparse(head)
    found = [
        part
        for node in ast.walk(syntax_tree(file) or ast.Module([], []))
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets)
        for part in ast.walk(node.value)
        if isinstance(part, ast.Call) and _switches_off(part)
    ]
    return max((part for part in found if part.lineno <= line), key=lambda part: part.lineno, default=None)


def _heads(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.context_expr for item in node.items]
    if isinstance(node, FUNCTIONS | ast.ClassDef):
        return node.decorator_list
    return []


def _managed(tree: ast.Module) -> Iterator[ast.expr]:
    """The heads of blocks and the decorators, whose effect ends with their block."""
    for node in ast.walk(tree):
        yield from _heads(node)


def _switches_off(expression: ast.expr) -> bool:
    call = expression if isinstance(expression, ast.Call) else None
    function = call.func if call is not None else expression
    name = last_name(function)
    if name not in _MODES:
        return False
    given = [*call.args, *(word.value for word in call.keywords)] if call is not None else []
    value = given[0] if given else None
    if name == "set_grad_enabled":
        return not (isinstance(value, ast.Constant) and value.value is True)
    return not (name == "inference_mode" and isinstance(value, ast.Constant) and value.value is False)


def inference_switches() -> list[Location]:
    """Every place in the user's code that switches inference mode on."""
    return [
        node_location("origin", file, head, "inference mode is switched on here")
        for file, tree in user_trees()
        for node in ast.walk(tree)
        for head in _heads(node)
        if _switches_off(head) and "inference_mode" in ast.unparse(head)
    ]


@contextlib.contextmanager
def gradients_always_on() -> Iterator[None]:
    """What the user's code is like if nothing in it switches gradients off; for a trial."""
    grad_mode, inference = torch._C._set_grad_enabled, torch._C._InferenceMode
    module: Any = torch._C
    module._set_grad_enabled = lambda mode: grad_mode(mode or _asked_by_user(sys._getframe(1)))
    module._InferenceMode = lambda mode: inference(mode and not _asked_by_user(sys._getframe(1)))
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        module._set_grad_enabled, module._InferenceMode = grad_mode, inference
        torch.set_grad_enabled(before)


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the first frame outside of torch's own switches is the user's, or that of the replay, on their behalf."""
    while frame is not None and frame.f_code.co_filename.endswith(_SWITCHES):
        frame = frame.f_back
    return frame is not None and (
        is_user_file(frame.f_code.co_filename) or frame.f_globals.get("__name__") == runner.__name__
    )
