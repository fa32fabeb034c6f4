"""A gather writes the parts of all ranks into one and the same tensor.

What: the list that `all_gather` or `gather` fills holds one tensor several times. Each part overwrites the one before,
and the tensor holds that of the last rank in the end: all places of the list show this part.

Why: the list was made as `[torch.zeros_like(x)] * world_size`, which repeats one tensor and makes no copies.

Cure: make one tensor for each rank: `[torch.zeros_like(x) for _ in range(world_size)]`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import JobFacts
from torchmedic.source.branches import nodes_around
from torchmedic.source.syntax import calls_in, nodes_in


@rule("TM732", "parts-in-one-tensor")
def check(job: JobFacts) -> Draft | None:
    seen = [each for each in job.ranks if each.into_one is not None]
    if not seen or seen[0].into_one is None:
        return None
    line = seen[0].into_one
    made = _made_at(line)
    draft = check.draft(job, "proven", "a gather writes the parts of all ranks into one and the same tensor")
    draft.cause = "its list holds one tensor several times, so each part overwrites the one before"
    if made is not None:
        draft.at(line_location("cause", line.file, made, "repeats one tensor, and makes no copies"))
    draft.at(line_location("cause" if made is None else "surfaced", line.file, line.line, "fills this list"))
    draft.because(f"seen on {ranks([each.rank for each in seen])}")
    draft.help("make one tensor for each rank: `[torch.zeros_like(x) for _ in range(world_size)]`")
    return draft.rated("warning")


def _made_at(line: StackFrame) -> int | None:
    """The only line of the function that multiplies a list which a gather is given."""
    around = nodes_around(line.file, line.line)
    calls = [*calls_in(around[-1])] if around else []
    given = {ast.unparse(each) for call in calls for each in call.args}
    repeated = [
        node.lineno
        for node in nodes_in(around[0] if around else None)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Mult)
        if isinstance(node.value.left, ast.List) or isinstance(node.value.right, ast.List)
        if any(ast.unparse(target) in given for target in node.targets)
    ]
    return repeated[0] if len(repeated) == 1 else None
