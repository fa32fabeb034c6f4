"""Which line switched gradients off for the code that runs at a given line."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from torchmedic.records import Location
from torchmedic.replay.step import runner
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.gradient_switches import Switch, heads, managed, switch_around, switches_off
from torchmedic.source.syntax import syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import loaded_files, user_trees

_SWITCHES = ("grad_mode.py", "_contextlib.py", "contextlib.py")


def where_switched_off(stack: Sequence[Spot], frames: Sequence[Frame], *, stays: bool) -> Switch | None:
    """The `with` block or decorator around one of these lines; if they stay off, a call that left them off for good."""
    places = [(spot.file, spot.line) for spot in stack] + [(frame.file, frame.line) for frame in reversed(frames)]
    for file, line in places:
        found = switch_around(file, line)
        if found is not None:
            return found
    if not stays:
        return None  # a function of a library's switches them off for its own time
    for file in dict.fromkeys([*(file for file, _ in places), *loaded_files()]):
        tree = syntax_tree(file) or ast.Module([], [])
        contained = set(map(id, managed(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and switches_off(node) and id(node) not in contained:
                return Switch(file, node, is_block=False, stays=True)
    return None


def inference_switches() -> list[Location]:
    """Every place in the user's code that switches inference mode on."""
    return [
        node_location("origin", file, head, "inference mode is switched on here")
        for file, tree in user_trees()
        for node in ast.walk(tree)
        for head in heads(node)
        if switches_off(head) and "inference_mode" in ast.unparse(head)
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
