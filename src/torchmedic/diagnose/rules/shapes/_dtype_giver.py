"""The call of the user's that gave a tensor its wrong dtype: a factory, or a conversion."""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.words.tensors import dtype, items_become, origin_of_whole
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.devices.device_births import Birth
from torchmedic.evidence.devices.stray_reasons import MAKERS
from torchmedic.evidence.devices.strays import traced
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.replay.step.trial import node_at
from torchmedic.source.live_frames import node_location

_CONVERSIONS = frozenset("to type half float double bfloat16 long int short byte bool cfloat cdouble".split())


def giver_of(evidence: RaisedEvidence, tensor: torch.Tensor) -> Location | None:
    """The call that made or converted a tensor; None where an operation computed its dtype."""
    found = items_become(evidence, tensor)
    if found is not None:
        return found
    trace = traced(evidence, StepFailure(evidence))
    births = trace.births_of(tensor, "dtype") if trace is not None else []
    return _in_replay(births, tensor) or _assigned(evidence, tensor) or _brought_in(evidence, births, tensor)


def _in_replay(births: list[Birth], tensor: torch.Tensor) -> Location | None:
    """Found in a helper function, a method or another file, too."""
    made = births[0].made if len(births) == 1 else None
    found = node_at(made.spot) if made is not None and made.spot is not None else None
    if made is None or made.spot is None or found is None or not _gives_dtype(found[0]):
        return None
    return node_location("cause", made.spot.file, found[0], f"becomes {dtype(tensor)} here")


def _brought_in(evidence: RaisedEvidence, births: list[Birth], tensor: torch.Tensor) -> Location | None:
    """The line that gave its result the dtype of a table which the step found there: `x * self.cos`."""
    mixing = {met.spot[:2]: met for each in births if (met := each.met) is not None and met.spot is not None}
    found = [(met, node_at(met.spot)) for met in mixing.values() if met.spot is not None]
    of_batch = any(each.leaf is given for each in births for given in evidence.incident.batch)
    if len(found) != 1 or found[0][1] is None or of_batch or any(each.met is None for each in births):
        return None
    met, node = found[0][0], found[0][1][0]
    assert met.spot is not None
    others = sorted({dtype(each.dtype) for each in met.inputs if each.dtype != tensor.dtype})
    label = f"a tensor of {dtype(tensor)} meets one of {' and '.join(others)} here"
    return node_location("cause", met.spot.file, node, label)


def _assigned(evidence: RaisedEvidence, tensor: torch.Tensor) -> Location | None:
    """Found by the assignment of the variable that was passed: `x = torch.from_numpy(rows)`."""
    made = origin_of_whole(evidence, tensor)
    if made is None or made.value is None or not _gives_dtype(made.value):
        return None
    return made.location("cause", f"`{made.name}` becomes {dtype(tensor)} here")


def _gives_dtype(node: ast.AST) -> bool:
    """Whether a node is a call of torch's that makes or converts a tensor, and not of a function of that name."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in MAKERS | _CONVERSIONS
    return False
