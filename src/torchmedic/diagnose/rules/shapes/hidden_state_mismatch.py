"""The hidden state of a recurrent layer has a shape that does not fit the input or the layer.

What: the hidden state has shape `[layers x directions, batch, hidden]`, independent of `batch_first`; an LSTM takes a
pair of such states.

Why: a state is carried over from the previous batch to a smaller last batch, `batch` and `layers` are swapped, or the
state was made once for a fixed batch size.

Cure: make the state from the batch itself (`x.size(0)`), cut it, or pass `drop_last=True` to the loader.
"""

from __future__ import annotations

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, incomplete_batch, layer_name, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import UNKNOWN


@rule("TM166", "hidden-state-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "IndexError"}:
        return None
    for frame in reversed(evidence.library_frames):
        layer = frame.module
        if frame.function != "forward" or not isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            continue
        given = frame.variables.get("input")
        # `hx` is rebound inside: what the user passed is the argument of the call above.
        hidden = _passed(evidence, frame.variables.get("hx"))
        if not isinstance(given, torch.Tensor) or hidden is None:
            return None
        return _compare(evidence, layer, given, hidden, frame.variables.get("batch_sizes"))
    return None


def _passed(evidence: RaisedEvidence, inside: object) -> object:
    for call in evidence.calls:
        if call.op == "forward" and len(call.arguments) > 1:
            found = call.get(1, "hx")
            if found is not UNKNOWN and found is not None:
                return found
    return inside


def _compare(
    evidence: RaisedEvidence, layer: nn.RNNBase | nn.RNNCellBase, given: torch.Tensor, hidden: object, sizes: object
) -> Draft | None:
    pair = isinstance(layer, nn.LSTM | nn.LSTMCell)
    if pair and isinstance(hidden, torch.Tensor):
        return _diagnosis(evidence, layer, hidden, "a pair of tensors", "one tensor", given)
    state = hidden[0] if isinstance(hidden, list | tuple) and hidden else hidden
    if not isinstance(state, torch.Tensor):
        return None
    if isinstance(layer, nn.RNNCellBase):
        expected = [layer.hidden_size] if given.dim() == 1 else [int(given.shape[0]), layer.hidden_size]
    else:
        depth = layer.num_layers * (2 if layer.bidirectional else 1)
        width = (getattr(layer, "proj_size", 0) or layer.hidden_size) if pair else layer.hidden_size
        if isinstance(sizes, torch.Tensor):
            expected = [depth, int(sizes[0]), width]
        elif _was_unbatched(evidence, given):
            expected = [depth, width]
        else:
            expected = [depth, int(given.shape[0 if layer.batch_first else 1]), width]
    if list(state.shape) == expected:
        return None
    return _diagnosis(evidence, layer, state, str(expected), shape(state), given)


def _was_unbatched(evidence: RaisedEvidence, given: torch.Tensor) -> bool:
    """torch adds the batch dimension to a sample without one before it compares."""
    call = evidence.find("forward")
    first = call.get(0, "input") if call is not None else given
    return isinstance(first, torch.Tensor) and first.dim() == 2


def _diagnosis(
    evidence: RaisedEvidence, layer: nn.Module, state: torch.Tensor, wanted: str, have: str, given: torch.Tensor
) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"{layer_name(evidence, layer)} was given a hidden state of {have} where it takes {wanted}"
    draft.cause = f"its input is {shape(given)}"
    draft.at(*evidence.at_user_line("cause", f"hidden state {have}, not {wanted}"))
    draft.at(made_here(evidence, state, f"becomes {shape(state)}"))
    batch = incomplete_batch(evidence)
    if batch is not None and batch[1] in state.shape:
        draft.because(
            f"this batch has {count(batch[0], 'sample')}, not {batch[1]}: the loader's last batch is not full"
        )
        draft.help("make the state for the batch at hand, or pass `drop_last=True` to the loader")
    elif wanted.startswith("a pair"):
        draft.help("pass both the hidden and the cell state: `lstm(x, (h, c))`")
    else:
        draft.help(
            "make the state from the input: `[layers x directions, batch, hidden]`, also with `batch_first=True`"
        )
    return draft
