"""Two matrices with different inner sizes were multiplied.

What: a matrix product needs the last size of the left operand to equal the second-last size of the right one. A linear
layer is such a product: its `in_features` must equal the last size of its input. The same holds for recurrent layers
(`input_size`), attention (`embed_dim`), `bmm` and `einsum`.

Why: most often a tensor was flattened, pooled or transposed to a size that the layer was not built for, or the size of
the layer was computed by hand for another input.

Cure: make the layer as wide as its input, or change the input to the width that the layer was built for.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._input_size import is_of_model
from torchmedic.diagnose.rules.shapes._shapes import PRODUCTS, Clash, by_message, product_clash
from torchmedic.diagnose.words.tensors import (
    argument_text,
    built_here,
    fed_by,
    layer_name,
    layer_of,
    made_here,
    shape,
)
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Call

_CELLS = frozenset("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())


@rule("TM151", "matmul-shape-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError", "AssertionError"}:
        return None
    call = evidence.find(*PRODUCTS)
    if call is not None:
        clash = product_clash(call)
        if clash is not None:
            layer = layer_of(evidence, call)
            if layer is not None and clash.wanted:
                return _layer(evidence, layer, clash.left.value, clash.wanted)
            return _operation(evidence, call, clash)
    return _width(evidence) or by_message(check, evidence, _MESSAGES, "in a matrix product {}", _ADVICE)


def _width(evidence: RaisedEvidence) -> Draft | None:
    """Layers that check the width of their input themselves, in Python or in one fused operation."""
    cell = evidence.find(*_CELLS)
    if cell is not None and (layer := layer_of(evidence, cell)) is not None:
        given = cell.get(0, "input")
        if isinstance(given, torch.Tensor) and given.dim() and given.shape[-1] != layer.input_size:
            return _layer(evidence, layer, given, int(layer.input_size))  # type: ignore[arg-type]
    for frame in reversed(evidence.library_frames):
        layer = frame.module
        pairs: list[tuple[str, int]] = []
        if isinstance(layer, nn.RNNBase):
            pairs = [("input", layer.input_size)]
        elif isinstance(layer, nn.MultiheadAttention):
            pairs = [("query", layer.embed_dim), ("key", layer.kdim), ("value", layer.vdim)]
        elif isinstance(layer, nn.TransformerEncoderLayer):
            pairs = [("src", layer.self_attn.embed_dim)]
        for name, wanted in pairs:
            given = frame.variables.get(name)
            if isinstance(given, torch.Tensor) and given.dim() and given.shape[-1] != wanted:
                assert layer is not None
                return _layer(evidence, layer, given, wanted)
    return None


def _layer(evidence: RaisedEvidence, layer: nn.Module, given: torch.Tensor, wanted: int) -> Draft:
    have = int(given.shape[-1])
    draft = check.draft(evidence, "proven")
    draft.message = f"{layer_name(evidence, layer)} was given {have} features where it takes {wanted}"
    draft.cause = f"its input is {shape(given)}, so the last size is {have}; the layer was built for {wanted}"
    built = built_here(evidence, layer, f"the layer is built for {wanted} features here")
    is_wrong_size = built is not None and wanted not in given.shape and is_of_model(evidence, layer, given)
    draft.at(msgspec.structs.replace(built, role="cause") if built is not None and is_wrong_size else None)
    draft.at(*evidence.at_user_line("surfaced" if is_wrong_size else "cause", f"{have} features meet {wanted}"))
    draft.at(made_here(evidence, given, f"becomes {shape(given)}"), None if is_wrong_size else built)
    draft.because(fed_by(evidence, layer))
    sizes = list(given.shape)
    if given.dim() > 2 and math.prod(sizes[1:]) == wanted:
        product = " x ".join(map(str, sizes[1:]))
        draft.help(f"flatten the input from dimension 1 on before the layer: {product} = {wanted}")
    elif given.dim() == 1 and have % wanted == 0:
        draft.because(f"{have} = {have // wanted} x {wanted}: the batch dimension was flattened too")
        draft.help("keep the batch dimension: `flatten(1)`, not `flatten()`")
    else:
        draft.help(f"build the layer for {have} features, or bring its input to {wanted}")
    return draft


def _operation(evidence: RaisedEvidence, call: Call, clash: Clash) -> Draft:
    left, right = clash.left.value, clash.right.value
    op = call.op.rstrip("_")
    draft = check.draft(evidence, "proven")
    draft.message = f"`{op}` of {shape(left)} and {shape(right)}: {clash.why}" if clash.wanted else clash.why
    draft.cause = f"the operands are {argument_text(clash.left)} and {argument_text(clash.right)}; {clash.why}"
    draft.at(*evidence.at_user_line("cause", clash.why))
    for side in (left, right):
        draft.at(made_here(evidence, side, f"becomes {shape(side)}"))
    if clash.transposed_fits:
        draft.help("transpose the right operand: its last size is the one that is needed")
    else:
        draft.help("transpose or reshape one operand so that the sizes agree")
    return draft


_MESSAGES = (
    (r"shapes cannot be multiplied \((\d+x\d+) and (\d+x\d+)\)", "{0} cannot be multiplied by {1}"),
    (r"batch2 tensor to be: (\[[\d, ]+\]) but got: (\[[\d, ]+\])", "the right operand begins with {1}, not with {0}"),
    (r"got input \(\d+\), mat \((\d+x\d+)\), vec \((\d+)\)", "{0} cannot be multiplied by {1}"),
    (r"same reduction dim, but got (\[[\d, ]+\]) X (\[[\d, ]+\])", "{0} cannot be multiplied by {1}"),
    (r"with shapes (\[[\d, ]+\]) and (\[[\d, ]+\]) cannot be multiplied", "{0} cannot be multiplied by {1}"),
    (r"input.size\(-1\) must be equal to input_size. Expected (\d+), got (\d+)", "{1} features meet {0}"),
)
_ADVICE = "make the inner sizes agree: transpose or reshape an operand, or build the layer for its input"
