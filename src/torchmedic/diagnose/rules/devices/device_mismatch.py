"""An operation was given tensors that are on different devices.

What: the tensors of one operation must all be on the same device. Torch never moves them by itself, but for a single
number from the CPU.

Why: the batch or the model was not moved; `x.to(device)` was called but its result not kept; a tensor was made in
`forward` without `device=`; a tensor is a plain attribute of the module, or a layer sits in a plain list: `.to()` moves
only registered parameters, buffers and submodules.

Cure: keep what `.to()` returns, make new tensors with `device=x.device`, register constants with `register_buffer` and
layers in `nn.ModuleList`.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.describe import built_here, listed
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.devices import never_had_values, reason_of, split_of
from torchmedic.replay.evidence import RaisedEvidence

CODE, NAME = "TM310", "device-mismatch"

_WORDS = (
    "same device",
    "expected device",
    "on cpu, but",
    "but expected on",
    "device type",
    "input type (",
    "indices should",
)


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    if not (evidence.kinds & {"RuntimeError", "ValueError"}) or not any(evidence.says(word) for word in _WORDS):
        return None
    split = split_of(evidence)
    if split is None or not split.strays:
        return _from_message(evidence)
    if never_had_values(evidence, split):
        return None
    stray = split.strays[0]
    others = [each for each in split.tensors if each.device != stray.device]
    name = f"`{type(split.layer).__name__}`" if split.layer is not None else f"`{split.op}`"
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"{name} was given tensors on different devices: `{stray.text}` is on {stray.device}, "
        f"`{others[0].text}` on {others[0].device}",
        listed([each.words for each in (stray, *others)], 3),
    )
    draft.at(*evidence.at_user_line("cause", f"{stray.device} meets {others[0].device}"))
    reason = reason_of(evidence, split)
    if reason is not None:
        draft.at(reason.place)
        draft.because(reason.fact)
        draft.help(reason.advice)
    else:
        draft.help(f"move `{stray.text}` to {others[0].device} before it is used")
    draft.at(built_here(evidence, split.layer, f"the parameters of this layer are on {_layer_device(split.layer)}"))
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _layer_device(layer: object) -> str:
    held = next(iter(getattr(layer, "_parameters", {}).values()), None)
    return str(held.device) if held is not None else "no device"


def _from_message(evidence: RaisedEvidence) -> Diagnosis | None:
    """The tensors cannot be read, but torch names their devices."""
    named = list(dict.fromkeys(re.findall(r"\b(?:cpu|meta|(?:cuda|xpu|mps|hpu)(?::\d+)?)\b", evidence.message)))
    if len(named) < 2:
        return None
    draft = Draft(
        CODE,
        NAME,
        "likely",
        f"an operation was given tensors on {named[0]} and on {named[1]}",
        "torch names these devices; the tensors themselves could not be read",
    )
    draft.at(*evidence.at_user_line("cause", f"{named[0]} meets {named[1]}"))
    draft.help("bring the model and everything that it is given to one device")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
