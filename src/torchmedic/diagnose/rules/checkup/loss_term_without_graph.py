"""TODO: what happened, in one sentence without a code or a cure.

What: TODO.

Why: TODO.

Cure: TODO.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.records import Diagnosis

CODE, NAME = "TM645", "loss-term-without-graph"


def check(evidence: CheckUp) -> Diagnosis | None:
    # TODO: return RULE.draft(evidence, "proven", message, cause).at(...).because(...).help(...).done()
    return None


RULE = Rule(CODE, NAME, check)
