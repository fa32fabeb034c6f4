"""A saved state does not fit the model or the optimizer that loads it.

What: `load_state_dict` needs exactly the names and shapes of the model.

Why: the model was saved inside a wrapper, so every name begins with `module.` or `_orig_mod.`; the file contains a
whole checkpoint, in which the state is one entry; or the sizes of the model differ from those of the saved model.

Cure: strip the prefix, load the entry that contains the state, or build the model with the sizes of the saved model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import built_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN

_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "_fsdp_wrapped_module.", "backbone.", "encoder.")


@rule("TM175", "state-dict-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.inside("load_state_dict")
    if frame is None or not evidence.kinds & {"RuntimeError", "TypeError", "ValueError", "KeyError"}:
        return None
    owner = frame.variables.get("self")
    if isinstance(owner, nn.Module):
        return _module(evidence, frame, owner)
    if isinstance(owner, torch.optim.Optimizer):
        return _optimizer(evidence, owner, _passed(evidence, frame))
    return None


def _passed(evidence: RaisedEvidence, frame: Frame) -> Any:
    call = evidence.find("load_state_dict")
    given = call.get(0, "state_dict") if call is not None else UNKNOWN
    return given if isinstance(given, Mapping) else frame.variables.get("state_dict")


def _module(evidence: RaisedEvidence, frame: Frame, module: nn.Module) -> Draft | None:
    saved = frame.variables.get("state_dict")
    kind = type(module).__name__
    if not isinstance(saved, Mapping):
        draft = check.draft(evidence, "proven")
        draft.message = f"`{kind}.load_state_dict` was given a {type(saved).__name__}, not a dict of tensors"
        draft.cause = "it takes what `state_dict()` returns"
        draft.at(*evidence.at_user_line("cause", f"a {type(saved).__name__}, not a state"))
        return draft.help("pass `other.state_dict()`, or what was saved of it")
    own = module.state_dict()
    missing, extra = [key for key in own if key not in saved], [key for key in saved if key not in own]
    if frame.variables.get("strict") is False:
        missing, extra = [], []
    sized = [key for key in own if key in saved and _shape(own[key]) != _shape(saved[key])]
    if not (missing or extra or sized):
        return None
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(own)} names are missing")
    if extra:
        parts.append(f"{len(extra)} names are unknown to it")
    if sized:
        parts.append(f"{len(sized)} of {len(own)} tensors have another shape")
    draft = check.draft(
        evidence, "proven", f"the saved state does not fit `{kind}`: {', '.join(parts)}", ", ".join(parts)
    )
    draft.at(*evidence.at_user_line("cause", parts[0]))
    draft.at(built_here(evidence, module, "the model is built here"))
    if missing:
        draft.because(f"missing: {listed([f'`{key}`' for key in missing])}")
    if extra:
        draft.because(f"unknown: {listed([f'`{key}`' for key in extra])}")
    for key in sized[:4]:
        draft.because(f"`{key}` is {_shape(saved[key])} in the saved state and {_shape(own[key])} in the model")
    _explain(draft, own, saved, missing, extra, sized)
    return draft


def _shape(value: Any) -> str:
    try:
        return shape(value) if isinstance(value, torch.Tensor) else type(value).__name__
    except RuntimeError:  # a lazy parameter has none
        return "unknown"


def _explain(
    draft: Draft,
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    missing: list[str],
    extra: list[str],
    sized: list[str],
) -> None:
    inner = [key for key, value in saved.items() if isinstance(value, Mapping) and set(own) <= set(value)]
    if inner:
        draft.because(f"entry `{inner[0]}` of what was loaded holds all {len(own)} names: it is a whole checkpoint")
        draft.help(f"load that entry: `load_state_dict(checkpoint[{inner[0]!r}])`")
        return
    prefix = _common_prefix(extra)
    if prefix and missing and {key.removeprefix(prefix) for key in saved} >= set(missing):
        draft.because(f"every unknown name begins with `{prefix}`; without it the names fit")
        draft.help(f"strip the prefix: `{{key.removeprefix({prefix!r}): value for key, value in state.items()}}`")
        return
    part = _part_that_fits(own, saved)
    if part:
        draft.because(f"the saved names are those of `{part}`, which is a part of the model")
        draft.help(f"load into that part: `model.{part}.load_state_dict(...)`")
        return
    fitting = any(key in own and _shape(own[key]) == _shape(value) for key, value in saved.items())
    draft.help("build the model as it was when it was saved")
    if fitting and sized:  # `strict=False` forgives names, and no shapes
        names = ", ".join(map(repr, sized[:4])) + (", ..." if len(sized) > 4 else "")
        draft.help(f"or take what does not fit ({names}) out of the state, and load the rest with `strict=False`")
    elif fitting:
        draft.help("or load only what fits with `strict=False`")


def _part_that_fits(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """The path of the only part of a model whose names the saved ones are."""
    first = next(iter(saved), "")
    prefixes = [key.removesuffix(first) for key in own if first and key.endswith(f".{first}")]
    fitting = [each for each in prefixes if all(_shape(own.get(each + key)) == _shape(saved[key]) for key in saved)]
    return fitting[0].rstrip(".") if len(fitting) == 1 else ""


def _common_prefix(keys: list[str]) -> str:
    """The prefix that all of these names share: a known one, or their first part."""
    if not keys:
        return ""
    candidates = (*_PREFIXES, keys[0].partition(".")[0] + "." if "." in keys[0] else "")
    return next((prefix for prefix in candidates if prefix and all(key.startswith(prefix) for key in keys)), "")


def _optimizer(evidence: RaisedEvidence, optimizer: torch.optim.Optimizer, saved: Any) -> Draft | None:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list):
        return None
    have = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in groups]
    if have == given:
        return None
    kind = type(optimizer).__name__
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"the saved state of an optimizer does not fit this `{kind}`: {given} parameters per group, not {have}"
    )
    draft.cause = f"parameters in each group of the optimizer: {have}; in the saved state: {given}"
    draft.at(*evidence.at_user_line("cause", f"{given} parameters, not {have}"))
    return draft.help("build the optimizer over the same parameters, in the same groups, as when it was saved")
