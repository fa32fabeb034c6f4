"""The ranks have built different models.

What: DistributedDataParallel compares the parameters of all ranks with those of rank 0 when it is built. On this rank
one of them has another shape, or the number of parameters differs.

Why: a size that each rank computes for itself: a vocabulary or a number of classes from its own share of the data, a
configuration that one rank reads before another has written it, a random architecture with a seed per rank.

Cure: compute the size once, on rank 0, and broadcast it to all ranks before the model is built.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.layer_construction import built_at

_SHAPE = re.compile(r"params\[(\d+)\] in this process with sizes (\[[\d, ]*\])")
_COUNT = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+)")


@rule("TM707", "parameters-differ-between-ranks")
def check(evidence: RaisedEvidence) -> Draft | None:
    if evidence.inside("_verify_param_shape_across_processes", "_verify_params_across_processes") is None:
        return None
    shape, count = _SHAPE.search(evidence.message), _COUNT.search(evidence.message)
    rank = evidence.rank
    if shape is not None:
        name, module = _owner(evidence, int(shape[1]))
        what = f"`{name}`" if name else f"parameter {shape[1]}"
        message = f"{what} has the shape {shape[2]} on rank {rank} and another one on rank 0"
        built = (
            built_at(evidence.frames, module, f"built with another size on rank {rank}") if module is not None else None
        )
    elif count is not None:
        message = f"the model has {count[2]} parameters on rank {count[1]} and {count[4]} on rank {count[3]}"
        built = None
    else:
        return None
    draft = check.draft(
        evidence, "proven", message, "a size or a part of the model was decided by each rank on its own"
    )
    built = msgspec.structs.replace(built, role="cause") if built is not None else None
    draft.at(built, *evidence.at_user_line("surfaced" if built is not None else "cause", "compared with rank 0 here"))
    return draft.help("compute what decides the size on rank 0, and broadcast it before the model is built").help(
        "or build the layers in the same order on all ranks: a `set` has another order in each process"
    )


def _owner(evidence: RaisedEvidence, index: int) -> tuple[str, Any]:
    """The name of a parameter by its number, and the layer that holds it."""
    for frame in reversed(evidence.frames):
        wrapper, module = frame.variables.get("self"), frame.variables.get("module")
        if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel) and isinstance(module, torch.nn.Module):
            names = [name for name, each in module.named_parameters() if each.requires_grad]
            if index < len(names):
                return names[index], module.get_submodule(names[index].rpartition(".")[0])
    return "", None
