"""Memory that ran out in a DataLoader worker: explained in the worker, reported by the main process.

Only the worker has the frames and objects. The exception travels to the main process as text, and the diagnosis
travels with it. Where the worker had no memory to examine itself, the main process explains the exception like any
other of a worker.
"""

from __future__ import annotations

import warnings

from msgspec.structs import replace

from torchmedic.detect.failures.exceptions import Raised
from torchmedic.detect.failures.exhaustion import exhaustion_of_error
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask
from torchmedic.evidence.data_loading import loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.autopsy import examine_memory
from torchmedic.observe.memory.host import HostMemory, host_memory
from torchmedic.records import Diagnosis, WorkerFailure

_EXAMINATION_BYTES = 256 << 20  # what the examination itself may take
_COLLECTED = "TM412"


def explain_in_worker(error: BaseException, failure: WorkerFailure) -> Diagnosis | None:
    """Explain an out-of-memory in the worker, while its frames are alive; None if nothing is certain."""
    if not _has_room(host_memory()):
        return None
    incident = Raised(
        error=error,
        symptom="out-of-memory",
        step=0,
        phase="data",
        rank=0,
        batch_indices=failure.batch_indices,
        exhaustion=exhaustion_of_error(error),
    )
    evidence = RaisedEvidence(incident)
    if evidence.exhaustion is None or evidence.exhaustion.where != "host":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evidence.autopsy = examine_memory(evidence)
        return ask(evidence, registry.OF_WORKER)


def _has_room(memory: HostMemory) -> bool:
    """Whether there is memory for an examination: a forked process copies every page that it looks at."""
    resident = memory.resident or 0
    rooms = [memory.available]
    if memory.cgroup_limit is not None:
        rooms.append(memory.cgroup_limit - resident)
    return all(room is None or room > resident + _EXAMINATION_BYTES for room in rooms)


def diagnosis_of_worker(evidence: RaisedEvidence) -> Diagnosis | None:
    """What the worker has found, with the line and step at which the main process missed its batch."""
    worker = evidence.incident.worker
    if worker is None or worker.diagnosis is None or (loading := loading_of(evidence)) is None:
        return None
    found = worker.diagnosis
    many = len(getattr(loading.iterator, "_workers", ()))
    facts = [loading.process]
    if many > 1 and found.code == _COLLECTED:
        facts.append(f"each of the {many} workers has memory of its own, and fills it in the same way")
    loop = loading.at_loop("surfaced", "the batch was asked for here")
    lines = {(each.file, each.line) for each in found.locations}
    return replace(
        found,
        step=evidence.incident.step,
        rank=evidence.incident.rank,
        locations=(*found.locations, *([loop] if loop is not None and (loop.file, loop.line) not in lines else [])),
        evidence=(*facts, *found.evidence),
    )
