"""The lengths given to `pack_padded_sequence` or `ctc_loss` do not fit the padded batch.

What: `pack_padded_sequence` takes one length per sequence of the batch. Each length must be at least 1, and the lengths
must be in decreasing order unless `enforce_sorted=False` is passed. The batch is dimension 1 unless `batch_first=True`
is passed. `ctc_loss` takes the lengths of the scores and of the targets, and none may be longer than its tensor.

Why: a batch in the order of the dataset, an empty text, or a forgotten `batch_first=True`. For `ctc_loss`, lengths of
the audio in front of a layer with a stride, which makes the sequence shorter.

Cure: pass `enforce_sorted=False`, remove empty sequences, and pass `batch_first=True` if the batch is dimension 0.
Compute the lengths again for every layer that makes the sequence shorter.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM150", "unusable-sequence-lengths")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside("ctc_loss")
    if frame is not None and "RuntimeError" in evidence.kinds:
        return _of_ctc(evidence, frame.variables)
    frame = evidence.inside("pack_padded_sequence")
    if frame is None or "RuntimeError" not in evidence.kinds:
        return None
    known = frame.variables
    padded, lengths, first = known.get("input"), known.get("lengths"), known.get("batch_first")
    if not isinstance(padded, torch.Tensor) or not isinstance(lengths, torch.Tensor) or padded.dim() < 2:
        return None
    if lengths.device.type != "cpu" or lengths.dim() != 1:
        return None
    values = lengths.tolist()
    batch = int(padded.shape[0 if first else 1])
    if len(values) != batch:
        why = f"{count(len(values), 'length')} for a batch of {batch}"
        swapped = int(padded.shape[1 if first else 0]) == len(values)
        advice = (
            f"pass `batch_first={not first}`: the batch is the other dimension"
            if swapped
            else "give one length per sequence"
        )
    elif min(values, default=1) <= 0:
        order = known.get("sorted_indices")  # with `enforce_sorted=False` the lengths are sorted by now
        shortest = values.index(min(values))
        why = f"sequence {shortest if order is None else int(order[shortest])} has length {min(values)}"
        advice = "leave empty sequences out of the batch, or give them one padding element"
    elif known.get("enforce_sorted") and values != sorted(values, reverse=True):
        at = next(at for at in range(1, len(values)) if values[at] > values[at - 1])
        why = f"length {values[at]} follows {values[at - 1]}, and the order must be decreasing"
        advice = "pass `enforce_sorted=False`"
    else:
        return None
    draft = check.draft(evidence, "proven", f"`pack_padded_sequence`: {why}", f"the padded batch is {shape(padded)}")
    draft.at(*evidence.at_user_line("cause", why))
    call = evidence.find("pack_padded_sequence")
    draft.at(made_here(evidence, call.get(1, "lengths") if call is not None else lengths, "is made"))
    return draft.help(advice)


def _of_ctc(evidence: RaisedEvidence, known: dict[str, Any]) -> Draft | None:
    """Lengths that are greater than the size of the tensor that they belong to."""
    scores, targets = known.get("log_probs"), known.get("targets")
    if not isinstance(scores, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return None
    rooms = (("input_lengths", scores, 0), ("target_lengths", targets, -1 if targets.dim() == 2 else None))
    for name, tensor, dim in rooms:
        lengths = known.get(name)
        values = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths or ())
        if dim is None or not values or max(values) <= tensor.shape[dim]:
            continue
        room = int(tensor.shape[dim])
        draft = check.draft(evidence, "proven")
        draft.message = f"`ctc_loss`: `{name}` has {max(values)}, and its sequences are {room} long"
        draft.cause = f"the tensor that `{name}` belongs to is {shape(tensor)}"
        draft.at(*evidence.at_user_line("cause", f"length {max(values)} meets {room}"))
        draft.at(made_here(evidence, lengths, "is made"))
        ratio = max(values) / room
        draft.because(f"the lengths are up to {ratio:.2g} times too long: does a layer with a stride come before?")
        return draft.help("compute the lengths again for the layers that make the sequence shorter")
    return None
