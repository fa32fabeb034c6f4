"""Cures for values out of range, tried on the failing step: another argument, another loss, a larger layer."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchmedic.diagnose.cures.graph_edits import with_keyword
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Safety, Treatment
from torchmedic.replay.step.trial import Edit, attempt, describe, edited, node_at, passes, source_of
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import Argument
from torchmedic.source.lookup.layers import layer_built_at
from torchmedic.source.lookup.origins import user_argument
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.spots import spot_of_node

_ROWS = frozenset({"num_embeddings", "out_features", "out_channels"})  # arguments that are the first size of a weight


class RangeCures:
    """Tries what might cure a value out of range; every method gives None where the step does not pass with it."""

    def __init__(self, evidence: RaisedEvidence) -> None:
        self._evidence = evidence
        self._failure = StepFailure(evidence)

    @property
    def _step(self) -> Any:
        return self._failure.step

    def argument(self, title: str, value: Any, text: str, *, safety: Safety = "edit") -> Treatment | None:
        """Pass something else for a value; `{}` in the text stands for what is passed now."""
        passed = user_argument(self._evidence.frames, value) or self._equal_argument(value)
        if passed is None or passed[1].node is None or self._step is None:
            return None
        frame, node = passed[0], passed[1].node
        now = (
            passed[1].text
            if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            else f"({passed[1].text})"
        )
        return self._edit(title, Edit(spot_of_node(frame.file, node), text.format(now)), safety)

    def keyword(self, title: str, name: str, value: Any, *, safety: Safety = "changes-training") -> Treatment | None:
        """Give the failing call, or the layer that makes it, one more keyword."""
        call = self._user_call
        layer = self._layer
        if layer is not None and hasattr(layer, name):
            return self._set(title, layer, name, value, safety)
        if call is None or self._step is None or any(part.arg in (name, None) for part in call[1].keywords):
            return None
        frame, node = call
        return self._edit(title, with_keyword(spot_of_node(frame.file, node), node, name, repr(value)), safety)

    def function(self, title: str, old: str, new: str, layer: str, *, safety: Safety = "edit") -> Treatment | None:
        """Call another function in place of one of torch's; `layer` is what its module is called."""
        call = self._user_call
        if self._step is None:
            return None
        if self._layer is not None:
            return self._other_forward(title, self._layer, new, layer, safety)
        if call is None or getattr(call[1].func, "attr", getattr(call[1].func, "id", "")) != old:
            return None
        frame, node = call
        now = source_of(spot_of_node(frame.file, node))
        return self._edit(title, Edit(spot_of_node(frame.file, node), now.replace(old, new, 1)), safety)

    def larger(self, title: str, layer: torch.nn.Module | None, now: int, wanted: int) -> Treatment | None:
        """Build a layer for more rows or classes."""
        if layer is None or self._step is None or wanted - now > 1_000_000:
            return None
        with _enlarged(layer, now, wanted):
            played = self._step.again()
        if not passes(played):
            return None
        built = layer_built_at(self._evidence.frames, layer, "")
        return Treatment(
            title=title,
            safety="changes-training",
            proven=True,
            result=describe(played),
            patch=_patched(built, lambda spot, node: _with_number(source_of(spot), node, type(layer), now, wanted)),
        )

    def _equal_argument(self, value: Any) -> tuple[Frame, Argument] | None:
        """The one argument of the failing call that has these values, if it was computed in the call: `y[:, None]`."""
        call = self._evidence.call
        if call is None or not call.frame.is_user or not isinstance(value, torch.Tensor):
            return None
        equal = [each for each in call.tensors if each.node is not None and _are_equal(each.value, value)]
        return (call.frame, equal[0]) if len(equal) == 1 else None

    # How it is tried

    def _edit(self, title: str, edit: Edit, safety: Safety) -> Treatment | None:
        verdict = attempt(self._step, edit)
        if not verdict.passed:
            return None
        return Treatment(title=title, safety=safety, proven=True, result=verdict.result, patch=verdict.patch)

    def _set(self, title: str, layer: torch.nn.Module, name: str, value: Any, safety: Safety) -> Treatment | None:
        if self._step is None:
            return None
        before = getattr(layer, name)
        setattr(layer, name, value)
        try:
            played = self._step.again()
        finally:
            setattr(layer, name, before)
        if not passes(played):
            return None
        built = layer_built_at(self._evidence.frames, layer, "")
        patch = _patched(built, lambda spot, node: with_keyword(spot, node, name, repr(value)).text)
        return Treatment(title=title, safety=safety, proven=True, result=describe(played), patch=patch)

    def _other_forward(
        self, title: str, layer: torch.nn.Module, function: str, kind: str, safety: Safety
    ) -> Treatment | None:
        other = getattr(torch.nn.functional, function)
        weight, reduction = getattr(layer, "weight", None), getattr(layer, "reduction", "mean")
        layer.__dict__["forward"] = lambda given, target: other(given, target, weight=weight, reduction=reduction)
        try:
            played = self._step.again()
        finally:
            layer.__dict__.pop("forward", None)
        if not passes(played):
            return None
        built = layer_built_at(self._evidence.frames, layer, "")
        patch = _patched(built, lambda spot, _: source_of(spot).replace(type(layer).__name__, kind, 1))
        return Treatment(title=title, safety=safety, proven=True, result=describe(played), patch=patch)

    @functools.cached_property
    def _layer(self) -> torch.nn.Module | None:
        """The loss module of torch's own that made the failing call, where one did."""
        for frame in reversed(self._evidence.library_frames):
            if frame.module is not None and type(frame.module).__module__.startswith("torch.nn"):
                return frame.module
        return None

    @functools.cached_property
    def _user_call(self) -> tuple[Frame, ast.Call] | None:
        frame = self._evidence.user_frame
        return (frame, frame.node) if frame is not None and isinstance(frame.node, ast.Call) else None


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@contextlib.contextmanager
def _enlarged(layer: torch.nn.Module, now: int, wanted: int) -> Iterator[None]:
    """A layer with more rows for a while; the new ones are copies of its first."""
    before = dict(layer._parameters)
    sizes = {name: value for name, value in vars(layer).items() if type(value) is int and value == now}
    try:
        for name, parameter in before.items():
            if parameter is not None and parameter.dim() and parameter.shape[0] == now:
                with torch.no_grad():
                    more = parameter.detach()[:1].expand(wanted - now, *parameter.shape[1:])
                    bigger = torch.cat([parameter.detach(), more])
                layer._parameters[name] = torch.nn.Parameter(bigger, requires_grad=parameter.requires_grad)
        for name in sizes:
            vars(layer)[name] = wanted
        yield
    finally:
        layer._parameters.update(before)
        vars(layer).update(sizes)


def _patched(built: Location | None, change: Callable[[Spot, ast.Call], str | None]) -> str:
    """The line that built a layer, changed, as a diff; empty where it is not known or does not say what must change."""
    if built is None:
        return ""
    spot = Spot(os.path.abspath(built.file), built.line, built.column - 1, built.line, built.end_column - 1, "")
    found = node_at(spot)
    if found is None or not isinstance(found[0], ast.Call):
        return ""
    text = change(found[1], found[0])
    try:
        return edited(Edit(found[1], text))[1] if text is not None and text != source_of(found[1]) else ""
    except CannotCut:
        return ""


def _with_number(text: str, node: ast.Call, layer: type, now: int, wanted: int) -> str | None:
    """The argument of a layer that says how many rows its weight has, replaced where it is this number."""
    names = list(inspect.signature(layer).parameters)
    name = next((each for each in names if each in _ROWS), "")
    given = [*zip(names, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
    number = next((value for each, value in given if each == name), None)
    if not isinstance(number, ast.Constant) or number.value != now or number.lineno != node.lineno:
        return None
    start = number.col_offset - node.col_offset
    data = text.encode()
    return (data[:start] + str(wanted).encode() + data[start + len(str(now)) :]).decode()
