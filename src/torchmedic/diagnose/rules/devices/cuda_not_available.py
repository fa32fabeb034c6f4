"""The script uses CUDA, but this process cannot use a GPU.

What: a tensor or a model was moved to a GPU, or a checkpoint that was saved on a GPU was loaded, but this process
cannot use a GPU at all.

Why: torch is a CPU build; the machine has no GPU or no driver; CUDA_VISIBLE_DEVICES hides all GPUs. A checkpoint stores
the device of its tensors, so a checkpoint from a GPU requires a GPU when it is loaded.

Cure: install a CUDA build of torch, correct CUDA_VISIBLE_DEVICES, or choose the device at run time with
`torch.cuda.is_available()`. Load checkpoints with `map_location="cpu"`, or with an available device.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

import torch

from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.diagnose.cures.edits import rewritten
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.devices._places import raised_at
from torchmedic.diagnose.words.tensors import count, origin
from torchmedic.evidence.devices.cuda_setup import CudaSetup, read_setup
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Treatment
from torchmedic.replay.isolation.torch_state import muted
from torchmedic.replay.step.trial import Edit, edited
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.failing_call import Call, raising_call
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import calls_in, nodes_in
from torchmedic.source.user_variables import user_trees

_NAME = re.compile(r"cuda(:\d+)?")
_CHOSEN = "the device is chosen here"
# What a build without CUDA says wherever CUDA is asked for.
_OF_CUDA = re.compile(r"\bCUDA\b|_cuda_|torch\.cuda|dummy base class|NCCL built in")


@rule("TM312", "cuda-not-available")
def check(evidence: RaisedEvidence) -> Draft | None:
    # A wrapper of DistributedDataParallel with the numbers of GPUs, around a model on the CPU.
    is_wrapped = evidence.says("device_ids", "type='cpu'") and not torch.cuda.is_available()
    # Its layers have kernels for GPUs only, and refuse a model or an input on the CPU.
    is_synced = evidence.says("SyncBatchNorm", "GPU") and not torch.cuda.is_available()
    if not (is_wrapped or is_synced or evidence.kinds & {"RuntimeError", "AssertionError", "AttributeError"}):
        return None
    if not (evidence.is_torchs or evidence.from_loader):
        return None
    if "AttributeError" in evidence.kinds and not evidence.says("torch._C"):
        return None  # the call is one of the user's own objects
    fault = device_fault_of(evidence.error)
    setup = read_setup()
    lacks_driver = fault is not None and fault.code == 35 and setup.lacks_driver
    if fault is not None and fault.kind != "not_available" and not lacks_driver:
        return None
    is_known = is_wrapped or is_synced
    if fault is None and not is_known and (setup.build is not None or not _OF_CUDA.search(_said(evidence.message))):
        return None
    reason = _reason(setup)
    saved = evidence.says("deserialize")
    draft = check.draft(evidence, "proven" if reason else "likely")
    draft.message = (
        f"{'the checkpoint was saved on a GPU' if saved else 'CUDA was asked for'}, "
        f"but {reason or 'this process cannot use a GPU'}"
    )
    draft.cause = reason or (fault.words if fault is not None else evidence.message.split("\n", 1)[0])
    converted = _calls_of("convert_sync_batchnorm") if is_synced else []
    if converted:
        draft.at(node_location("cause", *converted[0], "converted here to layers for GPUs only"))
        draft.at(*evidence.at_user_line("surfaced", "a GPU is needed here"))
    else:
        draft.at(*raised_at(evidence, "a GPU is asked for here"))
    draft.at(_chosen(evidence))
    if setup.build is not None and setup.hidden:
        draft.at(_hidden_here(evidence))
    draft.because(*setup.words)
    treated = _loaded_on_cpu(evidence) if saved else None
    draft.treat(treated)
    for advice in _advice(evidence, setup) if treated is None else ():
        draft.help(advice)
    return draft


def _calls_of(name: str) -> list[tuple[str, ast.Call]]:
    return [(file, call) for file, tree in user_trees() for call in calls_in(tree, name)]


def _said(message: str) -> str:
    """The first line, without the list of all backends that an operation has code for."""
    return message.split("\n", 1)[0].split("available for these backends", 1)[0]


def _advice(evidence: RaisedEvidence, setup: CudaSetup) -> Iterator[str]:
    if setup.build is None and setup.cards:
        yield "install a build of torch for CUDA: this one is for the CPU only"
    elif setup.build is not None and setup.hidden:
        yield "let CUDA_VISIBLE_DEVICES name a GPU that exists, or unset it"
    if evidence.says("deserialize"):
        yield 'load it with `map_location="cpu"`, or with the device that there is'
    elif evidence.says("device_ids"):
        yield "pass `device_ids` only for a model on a GPU; None for one on the CPU"
    elif evidence.says("NCCL"):
        yield 'use the backend "gloo" where there is no GPU'
    elif evidence.says("SyncBatchNorm"):
        yield "convert the model to SyncBatchNorm only where it is on a GPU"
    elif evidence.says("accelerator"):
        yield "pin memory only where there is a GPU: `pin_memory=torch.cuda.is_available()`"
    else:
        yield 'choose the device at run time: `device = "cuda" if torch.cuda.is_available() else "cpu"`'


def _reason(setup: CudaSetup) -> str:
    """The cause that the facts show; empty if they leave it open."""
    if setup.build is None:
        return "this torch is built for the CPU only"
    if setup.build.startswith("ROCm"):
        return ""
    if setup.hidden:
        return f"CUDA_VISIBLE_DEVICES={setup.visible!r} hides every GPU"
    if setup.driver is None and not setup.cards:
        return "no NVIDIA driver is loaded on this machine"
    if not setup.cards:
        return "this machine, or this container, shows no GPU"
    return ""


def _chosen(evidence: RaisedEvidence) -> Location | None:
    """The place that names the device of the failing call."""
    frame = evidence.user_frame
    call = raising_call(frame) if frame is not None else None
    for argument in call.arguments if call is not None else ():
        if isinstance(argument.node, ast.Name | ast.Attribute) and isinstance(argument.value, str | torch.device):
            found = origin(evidence, argument.value)
            return found.location("origin", _CHOSEN) if found is not None else _only_name()
    return _only_name() if call is not None else None


def _only_name() -> Location | None:
    """The only text in the user's files that names a GPU: a default of an option, a field of a configuration."""
    named = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value)
    ]
    return node_location("origin", *named[0], _CHOSEN) if len(named) == 1 else None


def _hidden_here(evidence: RaisedEvidence) -> Location | None:
    """The statement of the script's own that sets CUDA_VISIBLE_DEVICES."""
    trees = {frame.file: frame.tree for frame in evidence.frames if frame.is_user and frame.tree is not None}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.unparse(node.targets[0]):
                return node_location("origin", file, node, "hides the GPUs")
    return None


def _load(evidence: RaisedEvidence) -> Call | None:
    """The user's call of `torch.load`, if it names a file."""
    for frame in reversed(evidence.frames):
        call = raising_call(frame) if frame.is_user else None
        if call is not None and call.op == "load":
            return call if isinstance(call.get(0, "f"), str | os.PathLike) else None
    return None


def _loaded_on_cpu(evidence: RaisedEvidence) -> Treatment | None:
    """Load the file mapped to the CPU, without a copy in memory; only plain data is allowed."""
    call = _load(evidence)
    node = call.frame.node if call is not None else None
    if call is None or not isinstance(node, ast.Call):
        return None
    try:
        with muted():
            loaded = torch.load(call.get(0, "f"), map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return None  # of an older format, or with objects in it that are not let in
    text = rewritten(call.frame.file, node)
    given = next((word for word in node.keywords if word.arg == "map_location"), None)
    if given is not None:
        changed = rewritten(call.frame.file, node, [(given.value, '"cpu"')])
    else:
        changed = text.removesuffix(")").rstrip().removesuffix(",") + ', map_location="cpu")'
    many = sum(isinstance(each, torch.Tensor) for each in torch.utils._pytree.tree_iter(loaded))
    return Treatment(
        title="load its tensors onto the CPU",
        proven=True,
        result=f"{count(many, 'tensor')} loaded",
        patch=edited(Edit(spot_of_node(call.frame.file, node), changed))[1],
    )
