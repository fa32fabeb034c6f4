"""The script uses a GPU number that does not exist.

What: the visible GPUs of a process are numbered from 0. `cuda:1` is the second GPU; on a machine with one GPU it does
not exist.

Why: the script was written for a machine with more GPUs; more processes were started than there are GPUs, and each uses
the GPU of its LOCAL_RANK; CUDA_VISIBLE_DEVICES shows only some GPUs, which are still numbered from 0; a checkpoint was
saved on a GPU with a higher number.

Cure: use `cuda:0` or `cuda`, start as many processes as there are GPUs, and load checkpoints with `map_location`.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.diagnose.words.tensors import count, origin
from torchmedic.evidence.devices.cuda_setup import read_setup
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Argument, raising_call

_BY_NUMBER = frozenset({"cuda", "set_device", "device", "get_device_properties", "get_device_name", "to", "to_device"})
_NAMES = frozenset({"device", "device_id", "device_index", "local_rank", "index", "device_ids", "gpu", "rank"})


@rule("TM313", "invalid-device-ordinal")
def check(evidence: RaisedEvidence) -> Draft | None:
    fault = device_fault_of(evidence.error)
    if fault is None or fault.kind != "invalid_ordinal" or not (evidence.is_torchs or evidence.from_loader):
        return None
    have = torch.cuda.device_count()
    number, argument = _wanted(evidence, have)
    sure = number is not None and number >= have > 0
    seen = "there is 1 GPU, cuda:0" if have == 1 else f"there are {have} GPUs, cuda:0 to cuda:{have - 1}"
    asked = f"the script uses cuda:{number}" if sure else "a GPU was asked for that does not exist"
    draft = check.draft(evidence, "proven" if sure else "likely", f"{asked}, but {seen}", f"{fault.words}; {seen}")
    draft.at(*raised_at(evidence, f"cuda:{number}" if sure else "no such GPU"))
    if argument is not None:
        made = origin(evidence, argument.value)
        draft.at(made.location("origin", f"`{made.name}` comes from here") if made is not None else None)
    _advise(draft, evidence, number, have)
    return draft


def _advise(draft: Draft, evidence: RaisedEvidence, number: int | None, have: int) -> None:
    setup = read_setup()
    local, world = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if setup.visible is not None:
        draft.because(
            f"CUDA_VISIBLE_DEVICES={setup.visible!r} shows {count(have, 'GPU')} of {setup.cards or 'more'}, "
            "numbered from 0 whatever their own numbers are"
        )
    if local is not None and number is not None and local == str(number):
        draft.because(f"LOCAL_RANK is {local}" + (f", and {world} processes run on this machine" if world else ""))
        draft.help(f"start no more processes than GPUs on this machine: `torchrun --nproc-per-node={have}`")
    elif evidence.says("deserialize"):
        draft.help('load it with `map_location="cuda:0"`, or with the device that the model is on')
    elif setup.visible is not None:
        draft.help("count the GPUs from 0 among those that CUDA_VISIBLE_DEVICES shows")
    else:
        draft.help("use `cuda:0`, or `cuda` for the current GPU")


def _wanted(evidence: RaisedEvidence, have: int) -> tuple[int | None, Argument | None]:
    """The number that was asked for: the first one given, from the user's line inwards, that is too high."""
    named = re.search(r"CUDA device (\d+)", evidence.message)
    if named is not None:
        return int(named[1]), None
    start = evidence.frames.index(evidence.user_frame) if evidence.user_frame in evidence.frames else 0
    for frame in evidence.frames[start:]:
        call = raising_call(frame)
        for argument in call.arguments if call is not None else ():
            plain = call is not None and (call.op in _BY_NUMBER or argument.name in _NAMES)
            number = _highest(argument.value, plain)
            if number is not None and number >= have:
                return number, argument if frame.is_user else None
        if not frame.is_user:
            for name in _NAMES & set(frame.variables):
                number = _highest(frame.variables[name], True)
                if number is not None and number >= have:
                    return number, None
    return None, None


def _highest(value: Any, plain: bool) -> int | None:
    """The highest GPU that a value names: a device, `"cuda:1"`, a number where numbers mean GPUs, a list of them."""
    if isinstance(value, torch.device):
        return value.index if value.type == "cuda" else None
    if isinstance(value, str):
        found = re.fullmatch(r"cuda:(\d+)", value)
        return int(found[1]) if found is not None else None
    if isinstance(value, list | tuple):
        numbers = [number for each in value if (number := _highest(each, plain)) is not None]
        return max(numbers, default=None)
    return value if plain and type(value) is int else None
