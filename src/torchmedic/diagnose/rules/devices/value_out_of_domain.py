"""A loss or a distribution was given a value outside its domain.

What: binary cross entropy needs probabilities between 0 and 1, a sampler needs probabilities that are not negative, a
normal distribution needs a scale above 0, a distribution needs values inside its support. Outside this domain the
formula is not defined, so torch raises an error.

Why: raw scores were passed instead of probabilities (the sigmoid or softmax is missing), a scale is the direct output
of a layer and can be negative, or the values have been NaN since an earlier line.

Cure: pass scores to the variant that takes scores (`binary_cross_entropy_with_logits`, `logits=`), or transform the
value into the domain first (`softplus` or `exp` for a scale).
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import torch

from torchmedic.diagnose.cures.ranges import RangeCures
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here
from torchmedic.evidence.dataset_item import items_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.values import Strays, number, readable, span, where
from torchmedic.source.objects.graph import name_of

_WITH_SCORES = "BCEWithLogitsLoss"
_PROBABILITY = "between 0 and 1"
_SCORES = "pass raw scores to `binary_cross_entropy_with_logits`, or put a sigmoid before this line"


@rule("TM303", "value-out-of-domain")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not (evidence.kinds & {"RuntimeError", "ValueError"}):
        return None
    domain = domain_of(evidence)
    if domain is None:
        return None
    strays = domain.strays
    not_numbers = sum(1 for value in strays.values if isinstance(value, float) and math.isnan(value))
    first = number(strays.values[0])
    if not_numbers:
        message = f"`{domain.op}` was given NaN as `{domain.name}`, which must be {domain.must}"
    elif domain.as_a_whole:
        message = f"`{domain.op}` was given a `{domain.name}` that is not {domain.must}"
    else:
        message = f"`{domain.op}` was given {first} as `{domain.name}`, which must be {domain.must}"
    if domain.as_a_whole and not not_numbers:
        cause = f"`{domain.name}` {list(strays.shape)} is not {domain.must}"
    elif strays.total == 1:
        cause = f"`{domain.name}` is {first}"
    else:
        verb = "are" if strays.count > 1 else "is"
        cause = (
            f"{strays.count} of {strays.total} values {verb} not {domain.must}: `{strays.at(domain.name)}` is {first}"
        )
    draft = check.draft(evidence, "likely" if not_numbers else "proven", message, cause)
    draft.at(*evidence.at_user_line("cause", f"`{domain.name}` must be {domain.must}"))
    draft.at(made_here(evidence, domain.value, "comes from"))
    tensor = readable(domain.value)
    items = items_of(evidence.incident, tensor, strays.positions) if tensor is not None else []
    if items:
        draft.because(f"first in dataset item {items[0]}")
    if not_numbers:
        draft.because(
            f"{count(not_numbers, 'value')} of it {'is' if not_numbers == 1 else 'are'} NaN; it is older than this line"
        )
        return draft.help("look for the first NaN before this line; this line only rejected it")
    extent = span(tensor) if tensor is not None and strays.total > 1 else None
    if extent is not None:
        draft.because(f"the values run from {number(extent[0])} to {number(extent[1])}")
    _advise(draft, domain, RangeCures(evidence))
    return draft


def _advise(draft: Draft, domain: Domain, cures: RangeCures) -> None:
    made_by = name_of(domain.value.grad_fn) if domain.value is not None and domain.value.grad_fn is not None else ""
    squashed = any(word in made_by for word in ("Sigmoid", "Softmax", "Clamp", "Exp", "Softplus"))
    if made_by and not squashed:
        draft.because(
            f"it was made by `{made_by.removesuffix('0').removesuffix('Backward').lower()}`, which bounds nothing"
        )
    scores = domain.op == "binary_cross_entropy" and domain.name == "input"
    treatment = cures.function(domain.advice, domain.op, f"{domain.op}_with_logits", _WITH_SCORES) if scores else None
    draft.treat(treatment) if treatment is not None else draft.help(domain.advice)


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """One argument that is not what the operation needs."""

    op: str
    name: str
    must: str
    value: Any  # the tensor as it was given; None for a plain number
    strays: Strays
    advice: str
    as_a_whole: bool = False  # no single value is to blame, as in a matrix that is not positive definite


def domain_of(evidence: RaisedEvidence) -> Domain | None:
    """The refused argument of the operation that raised, if its live values bear that out."""
    frame = evidence.inside("binary_cross_entropy")
    if frame is not None:
        return _first(
            [
                ("input", frame.variables.get("input"), _SCORES),
                ("target", frame.variables.get("target"), "bring the targets to 0 and 1 before the loss"),
            ],
            "binary_cross_entropy",
        )
    return _of_distribution(evidence) or _of_sampler(evidence)


def _first(candidates: list[tuple[str, Any, str]], op: str) -> Domain | None:
    for name, given, advice in candidates:
        tensor = readable(given)
        strays = where(tensor, ~((tensor >= 0) & (tensor <= 1))) if tensor is not None else None
        if strays is not None:
            return Domain(op=op, name=name, must=_PROBABILITY, value=given, strays=strays, advice=advice)
    return None


def _of_distribution(evidence: RaisedEvidence) -> Domain | None:
    """A parameter that breaks its constraint, or a sample outside the support."""
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is None or frame.live.f_globals.get("__name__") != "torch.distributions.distribution":
        return None
    known = frame.variables
    owner = type(known.get("self")).__name__
    valid = readable(known.get("valid"))
    if frame.function == "__init__":
        name, given = str(known.get("param")), known.get("value")
        constraint = known.get("constraint")
        advice = _parameter_advice(name)
        # Some constructors normalise first; what the user passed is still in their own frame.
        passed = evidence.frames[-2].variables.get(name) if len(evidence.frames) > 1 else None
        tensor = readable(passed)
        if name == "probs" and tensor is not None and (strays := where(tensor, ~(tensor >= 0))) is not None:
            return Domain(op=owner, name=name, must="0 or more", value=passed, strays=strays, advice=advice)
    elif frame.function == "_validate_sample":
        name, given, constraint = "value", known.get("value"), known.get("support")
        advice = "pass values inside the support of the distribution"
    else:
        return None
    tensor = readable(given)
    if tensor is None or valid is None:
        return None
    as_a_whole = valid.dim() < tensor.dim() and bool(torch.isfinite(tensor).all())
    while valid.dim() < tensor.dim():
        valid = valid.unsqueeze(-1)
    strays = where(tensor, ~valid.expand_as(tensor))
    if strays is None:
        return None
    return Domain(
        op=owner, name=name, must=_words(constraint), value=given, strays=strays, advice=advice, as_a_whole=as_a_whole
    )


def _parameter_advice(name: str) -> str:
    if name in ("scale", "concentration", "rate", "df", "concentration0", "concentration1"):
        return f"make `{name}` positive, with `softplus` or `exp`, before it is passed"
    if name == "probs":
        return "pass raw scores as `logits=`, or turn them into probabilities first"
    return f"bring `{name}` into its domain before it is passed"


def _words(constraint: Any) -> str:
    """`GreaterThan(lower_bound=0.0)` as a person would say it."""
    text = str(constraint)
    if bound := re.search(r"GreaterThan\(lower_bound=([^)]*)\)", text):
        return f"above {bound[1].removesuffix('.0')}"
    if bound := re.search(r"GreaterThanEq\(lower_bound=([^)]*)\)", text):
        return f"{bound[1].removesuffix('.0')} or more"
    if bounds := re.search(r"Interval\(lower_bound=([^,]*), upper_bound=([^)]*)\)", text):
        return f"between {bounds[1].removesuffix('.0')} and {bounds[2].removesuffix('.0')}"
    return {"Simplex()": "probabilities that add up to 1", "PositiveDefinite()": "positive definite"}.get(
        text, "finite" if "Real()" in text else text
    )


# name -> (position and name of the argument, what it must be, advice)
_SAMPLERS = {
    "multinomial": (0, "input", "0 or more, and finite", "pass probabilities: put a softmax before this line"),
    "bernoulli": (0, "input", _PROBABILITY, "pass probabilities: put a sigmoid before this line"),
    "poisson": (0, "input", "0 or more", "make the rate positive, with `softplus` or `exp`"),
    "normal": (1, "std", "0 or more", "make the spread positive, with `softplus` or `exp`"),
    "normal_": (2, "std", "0 or more", "make the spread positive, with `softplus` or `exp`"),
}


def _of_sampler(evidence: RaisedEvidence) -> Domain | None:
    call = evidence.find(*_SAMPLERS)
    if call is None:
        return None
    position, name, must, advice = _SAMPLERS[call.op]
    given = call.get(position, name)
    shown = name if name == "std" else "probabilities" if call.op != "poisson" else "rate"
    if isinstance(given, int | float):
        number = torch.tensor(float(given))
        strays = where(number, ~(number >= 0))
        given = None
    else:
        tensor = readable(given)
        if tensor is None:
            return None
        bad = ~((tensor >= 0) & torch.isfinite(tensor)) if call.op == "multinomial" else ~(tensor >= 0)
        if call.op == "bernoulli":
            bad |= tensor > 1
        strays = where(tensor, bad)
        if strays is None and call.op == "multinomial" and tensor.dim():
            empty = tensor.sum(-1, keepdim=True) <= 0
            strays, must = where(tensor, empty.expand_as(tensor)), "above 0 somewhere in every row"
            advice = "leave at least one choice a probability above 0: a mask may have taken them all"
    if strays is None:
        return None
    return Domain(op=call.op, name=shown, must=must, value=given, strays=strays, advice=advice)
