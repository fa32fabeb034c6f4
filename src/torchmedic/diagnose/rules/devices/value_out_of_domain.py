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

from torchmedic.diagnose.cures.ranges import RangeCures
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here
from torchmedic.evidence.dataset_item import items_of
from torchmedic.evidence.domains import Domain, domain_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.values import number, readable, span

_WITH_SCORES = "BCEWithLogitsLoss"


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
    made_by = domain.value.grad_fn.name() if domain.value is not None and domain.value.grad_fn is not None else ""
    squashed = any(word in made_by for word in ("Sigmoid", "Softmax", "Clamp", "Exp", "Softplus"))
    if made_by and not squashed:
        draft.because(
            f"it was made by `{made_by.removesuffix('0').removesuffix('Backward').lower()}`, which bounds nothing"
        )
    scores = domain.op == "binary_cross_entropy" and domain.name == "input"
    treatment = cures.function(domain.advice, domain.op, f"{domain.op}_with_logits", _WITH_SCORES) if scores else None
    draft.treat(treatment) if treatment is not None else draft.help(domain.advice)
