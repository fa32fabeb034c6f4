"""Where the scores and the labels of a loss became unequal in number: a replay of the step shows what cut them.

A language model drops the last position of its inputs and the first of its labels. If one of the two is forgotten, or
cut further than the other, the sizes differ from that line on, and the loss is only where torch notices.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.shapes._losses import Given
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.dataset_item import line_of_dtype
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.preparation import line_in_collate
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.trace.provenance import FunctionCall, Provenance
from torchmedic.source.live_frames import Frame, place
from torchmedic.source.lookup.bad_value_makers import shares_memory
from torchmedic.source.lookup.failing_call import raising_call
from torchmedic.source.lookup.origins import Origin, origin_of
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import has_line

_CUTTING = ("__getitem__", "narrow", "split", "chunk", "tensor_split")
_KEEPING = frozenset("reshape view flatten contiguous clone detach long int to transpose permute squeeze".split())


class Refusal(Provenance):
    """The calls of a replay, and the tensors that were given to the call that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: tuple[torch.Tensor, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except Exception:
            given = (*args, *(kwargs or {}).values())
            self.refused = self.refused or tuple(each for each in given if isinstance(each, torch.Tensor))
            raise


class _Cut(NamedTuple):
    """A call that takes a part of a dimension."""

    call: FunctionCall
    dim: int
    whole: int
    part: int
    spot: Spot

    @property
    def label(self) -> str:
        return f"takes {self.part} of {self.whole}"


def replayed_until(evidence: RaisedEvidence) -> Refusal:
    """The calls of a replay of the step, up to the one that raised; none where it cannot be replayed."""
    replayed = Refusal()
    step = StepFailure(evidence).step
    if step is not None:
        step.runner.play(replayed, backward=False)
    return replayed


def mark_cuts(draft: Draft, evidence: RaisedEvidence, replayed: Refusal, given: Given) -> bool:
    """Mark the line from which on scores and labels are unequal in number; whether that is the cause."""
    scores, target = (_twin(replayed, tensor) for tensor in (given.input, given.target))
    if scores is None or target is None:
        return False
    of_scores, of_target = list(_cuts(replayed, scores)), list(_cuts(replayed, target))
    common = {id(cut.call) for cut in of_scores} & {id(cut.call) for cut in of_target}
    mine, theirs = ([cut for cut in cuts if id(cut.call) not in common] for cuts in (of_scores, of_target))
    if not mine and not theirs:
        return _mark_items(draft, evidence, replayed, given, scores)
    if (
        len(mine) > 1
        or len(theirs) > 1
        or _share(mine) / _share(theirs) != Fraction(_rows(given), given.target.numel())
    ):
        return False
    of_one = bool(_sources(replayed, scores) & _sources(replayed, target))
    if not of_one and any(cut.dim == 0 for cut in (*mine, *theirs)):
        return False  # samples are picked from inputs and labels by hand: either may be the wrong ones
    if mine and theirs:
        odd, other = sorted((mine[0], theirs[0]), key=lambda cut: cut.part)
        if odd.whole != other.whole:
            return False
        draft.mark(odd.spot, "cause", odd.label).mark(other.spot, "origin", other.label)
        return True
    if theirs:
        draft.mark(theirs[0].spot, "cause", f"the target {theirs[0].label}, the scores are of all {theirs[0].whole}")
        return True
    (cut,) = mine
    frame = next((one for one in evidence.frames if _is_in(one, cut.spot)), None)
    bound = _uncut(evidence, given, cut, frame) if frame is not None else None
    if bound is not None:
        draft.at(bound.location("cause", f"`{bound.name}` keeps all {cut.whole}"))
    elif frame is None and not of_one:
        draft.mark(cut.spot, "cause", cut.label)
        return True
    draft.mark(cut.spot, "origin", f"the scores are of {cut.part} of {cut.whole}")
    return bound is not None


def _rows(given: Given) -> int:
    """How many labels the scores take."""
    return given.input.numel() // int(given.input.shape[1])


def _twin(replayed: Refusal, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of the replay that the loss was given in place of one of the run."""
    found = [each for each in replayed.refused if each.shape == tensor.shape and each.dtype == tensor.dtype]
    return found[0] if len(found) == 1 else None


def _cuts(replayed: Refusal, root: torch.Tensor) -> Iterator[_Cut]:
    """The calls behind a tensor that took a part of one dimension."""
    for call in replayed.behind(root):
        if call.name not in _CUTTING or call.spot is None or not call.inputs or not call.outputs:
            continue
        before, after = list(call.inputs[0].shape), list(call.outputs[0].shape)
        unlike = [(dim, *sizes) for dim, sizes in enumerate(zip(before, after, strict=False)) if sizes[0] != sizes[1]]
        if len(before) == len(after) and len(unlike) == 1 and 0 < unlike[0][2] < unlike[0][1]:
            yield _Cut(call, *unlike[0], call.spot)


def _share(cuts: list[_Cut]) -> Fraction:
    return Fraction(cuts[0].part, cuts[0].whole) if cuts else Fraction(1)


def _sources(replayed: Refusal, tensor: torch.Tensor) -> set[int]:
    return {id(each) for each in (tensor, *replayed.sources_behind(tensor))}


def _is_in(frame: Frame, spot: Spot) -> bool:
    return frame.is_user and (frame.file, frame.function) == (spot.file, spot.function)


def _uncut(evidence: RaisedEvidence, given: Given, cut: _Cut, frame: Frame) -> Origin | None:
    """The statement that gives the labels their name, beside the cut of the scores or after it."""
    user = evidence.user_frame
    call = raising_call(user) if user is not None else None
    found = call.argument(1, "target") if call is not None else None
    if user is None or found is None:
        return None
    node = found.node
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPING:
        node = node.func.value
    bound = origin_of(evidence.frames, user, node) if isinstance(node, ast.Name) else None
    if bound is None or not isinstance(bound.node, ast.Assign) or bound.file != cut.spot.file:
        return None
    beside = has_line(bound.node, cut.spot.line) or bound.node.lineno > cut.spot.line
    return bound if beside and bound.node.lineno <= frame.line else None


def _mark_items(draft: Draft, evidence: RaisedEvidence, replayed: Refusal, given: Given, scores: torch.Tensor) -> bool:
    """The items of the dataset already have fewer or more labels than inputs."""
    batch = [each for each in evidence.incident.batch if isinstance(each, torch.Tensor)]
    target = next((each for each in batch if shares_memory(each, given.target)), None)
    inputs = [each for each in batch if any(each is source for source in replayed.sources_behind(scores))]
    if target is None or len(inputs) != 1 or target.dim() < 2 or inputs[0].shape[:1] != target.shape[:1]:
        return False
    sizes = inputs[0].shape[: target.dim()]
    if sizes.numel() != _rows(given) or target.numel() != given.target.numel() or sizes == target.shape:
        return False
    draft.because(f"the loader's batch has inputs of {shape(inputs[0])} and labels of {shape(target)}")
    made = line_of_dtype(evidence.incident, target)
    label = f"an item has labels of {shape(target.shape[1:])} here"
    if made is None:

        def is_target(value: Any, depth: int) -> bool:
            return any((each.shape, each.dtype) == (target.shape, target.dtype) for each in tensors_in(value, depth))

        indices = evidence.incident.batch_indices
        items = tuple(indices[0]) if len(indices) == 1 and isinstance(indices[0], list | tuple) else indices
        made = line_in_collate(evidence.frames, items, is_target)
        label = f"the labels become {shape(target)} here"
    draft.at(place("cause", made.file, made.line, label) if made is not None else None)
    return made is not None
