"""In which turns of a loop DistributedDataParallel exchanges gradients, where each rank decides that by itself."""

from __future__ import annotations

from typing import NamedTuple

from torchmedic.records.ranks import BACKWARD, Difference, Job
from torchmedic.source.branches import nodes_around
from torchmedic.source.syntax import calls_in


class Alone(NamedTuple):
    """The line with `no_sync`, and how many backwards the culprits and the others usually make for an update."""

    file: str
    line: int
    culprits: int
    others: int


def exchanged_less_often(job: Job, difference: Difference) -> Alone | None:
    """Why the culprits make fewer exchanges in as many turns: more of their backwards are under `no_sync`."""
    expected = difference.expected
    if expected is None or not (expected.native or expected.op == BACKWARD):
        return None
    made = [
        max((state.micro_steps for state in map(job.of, numbers) if state is not None), default=0)
        for numbers in (difference.culprits, difference.others)
    ]
    if not made[0] > made[1] > 0:
        return None
    around = ((at.file, node) for at in expected.frames for node in nodes_around(at.file, at.line)[1:])
    lines = ((file, call.lineno) for file, node in around for call in calls_in(node, "no_sync"))
    return next((Alone(file, line, *made) for file, line in lines), None)
