"""An operation was given tensors on different devices.

What: all tensors of one operation must be on the same device. torch never moves them automatically, except for a single
number from the CPU.

Why: the batch or the model was not moved; the result of `x.to(device)` was not kept; a tensor was made in `forward`
without `device=`; a tensor is a plain attribute of the module, or a layer is in a plain list: `.to()` moves only
registered parameters, buffers and submodules.

Cure: keep the result of `.to()`, make new tensors with `device=x.device`, register constants with `register_buffer` and
layers in `nn.ModuleList`.
"""

from __future__ import annotations

import re

import msgspec
import torch

from torchmedic.diagnose.cures.devices import explained
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import built_here, made_here
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.devices.placement import Misplaced, load_of, misplaced_state, never_had_values, split_of
from torchmedic.evidence.devices.strays import split_in_replay, strays_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.device.hidden_work import with_default_device
from torchmedic.source.live_frames import node_location

# What makes a tensor stay behind by itself, wherever it is used.
_AT_ORIGIN = ("made", "taken off", "dropped", "attribute", "container", "layers")
_WORDS = (
    "same device",
    "expected device",
    "on cpu, but",
    "but expected on",
    "device type",
    "input type (",
    "indices should",
)


@rule("TM310", "device-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not (evidence.kinds & {"RuntimeError", "ValueError"}) or not any(evidence.says(word) for word in _WORDS):
        return None
    if evidence.says("device type for generator"):
        return _generator(evidence)
    misplaced = misplaced_state(evidence.frames)
    if misplaced is not None:
        return _optimizer_state(evidence, misplaced)
    failure = StepFailure(evidence)
    split = split_of(evidence) or split_in_replay(evidence, failure)
    if split is None or not split.strays:
        return _from_message(evidence)
    if never_had_values(evidence, split):
        return None
    stray = split.strays[0]
    others = [each for each in split.tensors if each.device != stray.device]
    name = f"`{type(split.layer).__name__}`" if split.layer is not None else f"`{split.op}`"
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"{name} was given tensors on different devices: {stray.shown} is on {stray.device}, "
        f"{others[0].shown} on {others[0].device}"
    )
    draft.cause = listed([each.words for each in (stray, *others)], 3)
    reason, treated = explained(failure, split, strays_of(evidence, split, failure))
    place = reason.place if reason is not None else None
    meets = f"{stray.device} meets {others[0].device}"
    if reason is not None and place is not None and reason.kind in _AT_ORIGIN:
        draft.at(msgspec.structs.replace(place, role="cause"), *evidence.at_user_line("surfaced", meets))
    else:
        draft.at(*evidence.at_user_line("cause", meets), place)
    draft.because(reason.fact if reason is not None else "")
    draft.treat(treated)
    if treated is None:
        fallback = f"move {stray.shown} to {others[0].device} before it is used"
        draft.help(reason.advice if reason is not None else fallback)
    return draft.at(
        built_here(evidence, split.layer, f"the parameters of this layer are on {_layer_device(split.layer)}")
    )


def _layer_device(layer: object) -> str:
    held = next(iter(getattr(layer, "_parameters", {}).values()), None)
    return str(held.device) if held is not None else "no device"


def _optimizer_state(evidence: RaisedEvidence, found: Misplaced) -> Draft:
    """What an optimizer keeps of earlier steps stays where the parameters were then."""
    kind = type(found.optimizer).__name__
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`{kind}` keeps its state on {found.state.device}, for parameters that are on {found.parameter.device}"
    )
    draft.cause = (
        f"`{found.key}` {list(found.state.shape)} is on {found.state.device}, its parameter on "
        f"{found.parameter.device}; so it is for {found.affected} of {found.total} parameters"
    )
    draft.at(*evidence.at_user_line("cause", f"{found.state.device} meets {found.parameter.device}"))
    loaded = load_of(evidence.frames, found.optimizer)
    if loaded is not None:
        label = f"loaded while the parameters were on {found.state.device}"
        draft.at(node_location("origin", *loaded, label))
        draft.help("move the model before the optimizer's state is loaded")
    else:
        draft.because(f"the parameters have moved to {found.parameter.device} since the state was made")
        draft.help("move the model before the first step, or load the optimizer's state again after the move")
    return draft


def _generator(evidence: RaisedEvidence) -> Draft | None:
    """Random numbers are drawn on the device of their generator, and on no other."""
    given = next(
        (each for call in evidence.calls for each in call.arguments if isinstance(each.value, torch.Generator)), None
    )
    generator = given.value if given is not None else None
    named = re.findall(r"'(\w+)'", evidence.message)
    if not isinstance(generator, torch.Generator) or not named or named[0] == generator.device.type:
        return None
    wanted, have = named[0], generator.device
    draft = check.draft(evidence, "proven")
    draft.message = f"random numbers for {wanted} were to be drawn by a generator of {have}"
    draft.cause = f"a generator draws only on its own device, which is {have}"
    draft.at(*evidence.at_user_line("cause", f"{wanted} is used with a generator of {have}"))
    draft.at(made_here(evidence, generator, f"draws on {have}, made"))
    with with_default_device():
        default = torch.get_default_device()
    if evidence.user_frame is not evidence.frames[-1] and default.type == wanted:
        draft.because(f"`torch.set_default_device` has made {wanted} the device of all that is drawn, by a loader too")
        draft.help(f'give the loader a generator of its own: `generator=torch.Generator(device="{wanted}")`')
    else:
        draft.help(f'make the generator for the device: `torch.Generator(device="{wanted}")`')
    return draft


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    """The tensors cannot be read, but torch names their devices."""
    named = list(dict.fromkeys(re.findall(r"\b(?:cpu|meta|(?:cuda|xpu|mps|hpu)(?::\d+)?)\b", evidence.message)))
    if len(named) < 2:
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"an operation was given tensors on {named[0]} and on {named[1]}"
    draft.cause = "torch names these devices; the tensors themselves could not be read"
    draft.at(*evidence.at_user_line("cause", f"{named[0]} meets {named[1]}"))
    return draft.help("bring the model and everything that it is given to one device")
