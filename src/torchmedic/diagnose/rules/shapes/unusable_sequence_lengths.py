"""The lengths given to `pack_padded_sequence` do not fit the padded batch.

What: `pack_padded_sequence` takes one length per sequence of the batch. Each length must be at least 1, and the lengths
must be in decreasing order unless `enforce_sorted=False` is passed. The batch is dimension 1 unless `batch_first=True`
is passed.

Why: a batch in the order of the dataset, an empty text, or a forgotten `batch_first=True`.

Cure: pass `enforce_sorted=False`, remove empty sequences, and pass `batch_first=True` if the batch is dimension 0.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence


@rule("TM150", "unusable-sequence-lengths")
def check(evidence: RaisedEvidence) -> Draft | None:
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
