"""The line in a function of the user's that gave the loss its wrong kind: several elements, or a complex number."""

from __future__ import annotations

import torch
from torch import nn

from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.provenance import FunctionCall, Provenance
from torchmedic.source.lookup.layers import roots
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import FUNCTIONS, function_of, has_line

_SCALING = frozenset(f"{name}{op}{name}" for name in ("", "__") for op in ("add", "sub", "mul", "div", "neg", "rsub"))
_SCALED = _SCALING | frozenset("__radd__ __rsub__ __rmul__ __rdiv__ __truediv__ __rtruediv__ true_divide".split())


class UnfitLoss:
    """A replay of the step, and the loss that it computed."""

    def __init__(self, evidence: RaisedEvidence, loss: torch.Tensor) -> None:
        self._evidence = evidence
        self._trace = Provenance()
        self.root: torch.Tensor | None = None
        step = StepFailure(evidence).step
        if step is not None:
            step.runner.play(self._trace, backward=False)  # and stops there, like the run
            results = [each for call in reversed(self._trace.calls) for each in call.outputs]
            alike = (each for each in results if (each.shape, each.dtype) == (loss.shape, loss.dtype))
            self.root = next(alike, None)

    def made_complex(self) -> Spot | None:
        """Where complex numbers were put together to one complex number."""
        for call in self._trace.behind(self.root) if self.root is not None else ():
            if any(each.is_complex() and each.numel() > 1 for each in call.inputs):
                return call.spot
        return None

    def unreduced(self) -> Spot | None:
        """Where a function of the user's other than the one that calls backward computed the loss and its targets."""
        call = self._maker(self.root) if self.root is not None else None
        spot = call.spot if call is not None else None
        if spot is None or self.root is None or self._is_beside(spot) or self._of_model(self.root):
            return None
        return spot

    def _maker(self, tensor: torch.Tensor) -> FunctionCall | None:
        """The call behind a sum with numbers, or a product, that has so many elements of its own."""
        while True:
            number = self._trace.maker_of(tensor)
            call = self._trace.calls[number] if number is not None else None
            same = [each for each in call.inputs if each.numel() == tensor.numel()] if call is not None else []
            if call is None or len(same) != 1 or call.name not in _SCALED or same[0] is tensor:
                return call
            tensor = same[0]

    def _is_beside(self, spot: Spot) -> bool:
        """Whether a line is of the function that calls backward."""
        frame = self._evidence.user_frame
        if frame is None or frame.file != spot.file:
            return frame is None
        body = function_of(frame.tree, frame.live.f_code) if frame.tree is not None else None
        return not isinstance(body, FUNCTIONS) or has_line(body, spot.line)

    def _of_model(self, root: torch.Tensor) -> bool:
        """Whether only one input went into it: the outputs of a model, not a loss."""
        own = {id(each) for module in roots(self._evidence.frames) for each in _held(module)}
        made = [each for call in self._trace.behind(root) if not call.inputs for each in call.outputs]
        given = [*self._trace.sources_behind(root), *made]
        return len([each for each in given if each.numel() > 1 and not each.requires_grad and id(each) not in own]) < 2


def _held(module: nn.Module) -> list[torch.Tensor]:
    return [*module._parameters.values(), *module._buffers.values()]  # type: ignore[list-item]
