"""`torch.load` refused a class or function that the file wants to be called.

What: a file of `torch.save` is a pickle, and a pickle may call any function while it is read. Since torch 2.6
`torch.load` reads with `weights_only=True`: tensors, numbers, strings and containers pass, everything else is refused.

Why: the file holds more than weights: a whole model, a config object, an `argparse.Namespace`, an array of numpy. Or
it was not written by `torch.save`.

Cure: save `model.state_dict()` and plain values. For an old file that you trust, allow its classes with
`torch.serialization.add_safe_globals([...])`. Only for a file from a trusted source: `weights_only=False`, which lets
the file run code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.exception import RaisedEvidence

_UNPICKLER = "torch._weights_only_unpickler"


@rule("TM180", "unpickling-refused")
def check(evidence: RaisedEvidence) -> Draft | None:
    loading, reading = evidence.inside("load"), _reading_frame(evidence.error)
    if loading is None or reading is None or "UnpicklingError" not in evidence.kinds:
        return None
    draft = _blocked(evidence, reading) or _not_allowed(evidence, reading, loading.variables) or _foreign(evidence)
    if loading.variables.get("weights_only_not_set"):
        draft.because("`weights_only` is not given; the default is True since torch 2.6")
    return draft.because("the file was not executed to find this out")


def _reading_frame(error: BaseException) -> FrameType | None:
    """The frame of torch's restricted unpickler that refused; torch raises its own error in place of that one."""
    refused = error.__context__
    traceback = refused.__traceback__ if refused is not None else None
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame if traceback is not None else None
    return frame if frame is not None and frame.f_globals.get("__name__") == _UNPICKLER else None


def _blocked(evidence: RaisedEvidence, reading: FrameType) -> Draft | None:
    """A module that torch never allows, such as `os`: its functions reach beyond the file."""
    if not evidence.says("whose module", "is blocked"):
        return None
    path = reading.f_locals.get("full_path", "")
    draft = check.draft(evidence, "proven")
    draft.message = f"`torch.load` refused the file: it wants to call `{path}`"
    draft.cause = (
        "no file of weights needs a function of this module, and torch allows none of them: they act on the machine"
    )
    draft.at(*evidence.at_user_line("cause", f"`{path}` is blocked"))
    return draft.help("do not load this file; get the weights from a source that you trust, as safetensors at best")


def _not_allowed(evidence: RaisedEvidence, reading: FrameType, loading: dict[str, Any]) -> Draft | None:
    """A class or function that is not on the list; the message and the local variables of the unpickler name it."""
    path = reading.f_locals.get("full_path")
    if not isinstance(path, str) or not evidence.says(f"GLOBAL {path} was not an allowed global"):
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"`torch.load` refused the file: it holds `{path}`, not only weights"
    draft.cause = "with `weights_only=True` nothing but tensors, numbers, strings and containers is read"
    draft.at(*evidence.at_user_line("cause", f"`{path}` is refused"))
    others = [each for each in _all_refused(loading.get("f")) if each != path]
    draft.because(f"the file also holds {listed([f'`{each}`' for each in others])}" if others else "")
    modules = [each for each in (path, *others) if _is_layer(each)]
    if modules:
        draft.because(f"`{modules[0]}` is a layer: a whole model was saved, not its `state_dict()`")
        draft.help("save `model.state_dict()`, and load it into a model that the code has built")
    else:
        draft.help("save plain values beside the `state_dict()`: numbers, strings, dicts of them")
    if not any(each.startswith("builtins.") for each in (path, *others)):  # `eval` is not made harmless by a list
        names = ", ".join(each.removeprefix("__main__.") for each in (path, *others))
        draft.help(f"for a file that you trust, allow what it holds: `torch.serialization.add_safe_globals([{names}])`")
    return draft.help("only for a file from a trusted source, as it may run code: `weights_only=False`")


def _foreign(evidence: RaisedEvidence) -> Draft:
    """An instruction of pickle that the restricted unpickler does not have."""
    draft = check.draft(evidence, "likely")
    draft.message = "`torch.load` refused the file: its pickle has more than `torch.save` writes for weights"
    draft.cause = (
        "with `weights_only=True` only the instructions are read that `torch.save` uses for tensors and containers"
    )
    draft.at(*evidence.at_user_line("cause", "the file is refused"))
    draft.help("write the file with `torch.save(model.state_dict(), path)`")
    return draft.help("only for a file from a trusted source, as it may run code: `weights_only=False`")


def _all_refused(file: Any) -> list[str]:
    """All that the file names and torch does not allow, by its instructions alone: nothing of it is executed."""
    found: list[str] = []
    if isinstance(file, str | os.PathLike):
        with contextlib.suppress(Exception):  # the old format, a file that is gone by now, an older torch
            found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return found


def _is_layer(path: str) -> bool:
    """Whether this names a class of layers that is already imported; nothing is imported to find out."""
    module, _, name = path.rpartition(".")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return isinstance(found, type) and issubclass(found, nn.Module)
