"""All DataLoader workers draw the same random numbers, because they have copies of one generator.

What: the dataset has its own random generator. Each worker gets a copy of the dataset and of the generator, in the same
state. All workers therefore augment their samples in the same way, and repeat it in every epoch.

Why: the DataLoader seeds `random`, `numpy.random` and `torch` in every worker, but not a generator that belongs to the
dataset.

Cure: draw from `torch` or `numpy.random` directly, or seed the generator in a `worker_init_fn` from
`torch.utils.data.get_worker_info().seed`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import SameRandomnessInWorkers
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location


@rule("TM618", "same-randomness-in-workers")
def check(evidence: LoopEvidence) -> Draft | None:
    incident = evidence.incident
    if not isinstance(incident, SameRandomnessInWorkers) or not evidence.is_users(incident.cause):
        return None
    name, workers = incident.name, incident.workers
    draft = check.draft(evidence, "proven")
    draft.message = f"all {workers} workers draw the same random numbers from `self.{name}`"
    draft.cause = (
        f"`self.{name}` is a {incident.kind} of the dataset, of which every worker has a copy in the same state"
    )
    draft.at(
        _made(evidence, incident, "copied into every worker as it is")
        or evidence.at("cause", incident.cause, f"draws from `self.{name}`"),
        evidence.at("surfaced", incident.data, f"{workers} workers read the samples"),
    )
    draft.because("no worker_init_fn is given, and __getitem__ does not seed it")
    draft.help(
        "draw from `torch` or `numpy.random`, which are seeded in every worker, or seed it in a `worker_init_fn`"
    )
    return draft.rated("warning")


def _made(evidence: LoopEvidence, incident: SameRandomnessInWorkers, label: str) -> Location | None:
    """Where the dataset makes its generator."""
    file = incident.cause.file
    owner = incident.dataset.__name__
    for cls in evidence.classes(file):
        for node in evidence.assignments(file, f"self.{incident.name}"):
            if cls.name == owner and cls.lineno <= node.lineno <= (cls.end_lineno or cls.lineno):
                return node_location("cause", file, node, label)
    return None
