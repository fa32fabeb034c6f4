"""The step needs more memory than the device has.

What: an allocation on the device was refused. The table shows what held the memory at that moment: parameters,
gradients, optimizer state, activations that were saved for backward (by line), the batch, other tensors by the name
that holds them, the cache of the allocator, the CUDA context, other processes. The first line shown is the line that
holds most.

Why: batch size, sequence length or image size, and depth determine how much is saved for backward; parameters,
gradients and optimizer state together take 16 bytes per parameter with Adam in float32.

Cure: use a smaller batch with gradient accumulation, lower precision (`torch.autocast`), checkpointing of the layers
that save most (`torch.utils.checkpoint`), or an optimizer with less state.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.memory import add_cures
from torchmedic.diagnose.rule import Draft, RuleAnswer, rule
from torchmedic.diagnose.rules.memory._table import biggest, differentiated, most_held, noticed, shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.autopsy import Autopsy


@rule("TM402", "does-not-fit")
def check(evidence: RaisedEvidence) -> Draft | RuleAnswer | None:
    exhaustion = evidence.exhaustion
    if exhaustion is None or not exhaustion.on_device:
        return None
    autopsy = evidence.autopsy
    asked = autopsy.asked if autopsy is not None else exhaustion.asked
    device = f"{exhaustion.where}:{exhaustion.index or 0}"
    want = f" for {size(asked)}" if asked is not None else ""
    message = f"there is no memory{want} on {device}{_missing(autopsy)}"
    if exhaustion.beside:
        free = f": {size(exhaustion.free)} are free" if exhaustion.free is not None else ""
        message = f"{exhaustion.beside} found no memory on {device}{free}"
    draft = check.draft(evidence, "proven", message, _cause(autopsy))
    if autopsy is None:
        draft.at(*evidence.at_user_line("cause", "refused here"))
        draft.because(*(f"{size(use)} are held by process {pid}" for pid, use in exhaustion.other_processes[:3]))
        return draft.help("use a smaller batch, lower precision or checkpointing")
    draft.at(most_held(autopsy), differentiated(autopsy), *noticed(autopsy))
    shown(draft, autopsy)
    cures = add_cures(draft, autopsy)
    if not cures.is_help:
        draft.help(_advice(autopsy))
    return RuleAnswer(draft.done(), cures.plan)


def _missing(autopsy: Autopsy | None) -> str:
    """The bytes that are missing, in words."""
    if autopsy is None or autopsy.asked is None or autopsy.measured.limit is None:
        return ""
    measured = autopsy.measured
    assert measured.limit is not None
    room = min(max(0, measured.limit - measured.reserved), measured.free if measured.free is not None else 1 << 62)
    short = autopsy.asked - room
    return f": {size(short)} too little" if short > 0 else ""


def _cause(autopsy: Autopsy | None) -> str:
    if autopsy is None:
        return "the allocator of the device refused it"
    parts = ", ".join(f"{heading} ({size(nbytes)})" for heading, nbytes in biggest(autopsy))
    if not parts:
        return "the device has no memory left"
    limit = autopsy.measured.limit
    of = f" of {size(limit)}" if limit is not None else ""
    return f"the biggest holders{of}: {parts}"


def _advice(autopsy: Autopsy) -> str:
    heading = biggest(autopsy, 1)[0][0] if biggest(autopsy, 1) else ""
    if heading == "saved activations" and autopsy.saved_lines:
        modules = autopsy.saved_lines[0].modules
        where = f" of `{modules[0]}` and similar layers" if modules else ""
        return f"use a smaller batch and accumulate gradients, or checkpoint the forward pass{where}"
    if heading == "optimizer state":
        return "use an optimizer with less state, keep its state in 8 bits, or shard it over several devices"
    if heading in ("parameters", "gradients"):
        return "use lower precision, train fewer parameters, or shard the model over several devices"
    if heading == "other processes":
        return "end the other processes on this device, or use another one"
    return "use a smaller batch and accumulate gradients, lower precision, or checkpointing"
