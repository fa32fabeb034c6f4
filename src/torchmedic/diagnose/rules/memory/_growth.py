"""What all rules about growing memory say in the same words."""

from __future__ import annotations

import ast

from torchmedic.diagnose.cures.edits import rewritten
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.evidence.leaks.source.sites import Site
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.source.user_code import relative, source_line

_PERIODS = {
    "pass": "pass over the data",
    "trial": "trial",
    "validation": "validation",
    "step": "step",
    "batch": "batch",
}


def period(evidence: LeakEvidence) -> str:
    return _PERIODS[
        "batch" if evidence.worker is not None and evidence.growth.period == "step" else evidence.growth.period
    ]


def span(evidence: LeakEvidence) -> str:
    """From when to when it was seen to grow; a worker counts its own batches."""
    growth, unit = evidence.growth, "batch" if evidence.worker is not None else "step"
    return f"from {unit} {growth.first.step} to {unit} {growth.last.step}"


def where(evidence: LeakEvidence) -> str:
    """The process in words; empty for the process that trains."""
    if evidence.worker is None:
        return ""
    worker, workers = evidence.worker
    others = f", one of {workers}: each worker has its own copy" if workers > 1 else ""
    return f"that is in DataLoader worker {worker}{others}"


def measured(evidence: LeakEvidence) -> str:
    """The change of the process's memory meanwhile, in words."""
    growth = evidence.growth
    if not evidence.measured:
        return "so far the growth is too small to be visible in the memory of the process"
    kind = "memory allocated on the GPU" if evidence.on_device else "resident memory"
    each = evidence.measured / max(1, growth.periods)
    return f"{kind} grew by {size(evidence.measured)} {span(evidence)}, {size(int(each))} per {period(evidence)}"


def graph(evidence: LeakEvidence, whose: str) -> str:
    """The memory that the graph of one item keeps: all saved tensors, or only its nodes."""
    nodes, freed, nbytes = evidence.graph
    if not nodes:
        return ""
    kept = (
        "a backward has freed what they had saved, so that only the nodes are left"
        if freed
        else f"what its nodes have saved was not freed, and is kept too{f': {size(nbytes)}' if nbytes else ''}"
    )
    return f"the graph of {whose} has {nodes:,} {_plural('node', nodes)}; {kept}"


def end(evidence: LeakEvidence) -> str:
    """When memory ends at this rate."""
    left = evidence.periods_left
    if left is None:
        return ""
    growth = evidence.growth
    where = "on the GPU" if evidence.on_device else "for this process"
    each = (growth.last.step - growth.first.step) / max(1, growth.periods)  # steps of one period
    at = f"at about step {rounded(int(growth.last.step + left * each))}" if each else ""
    more = f"after about {rounded(left)} more {_plural(period(evidence), left)}"
    if evidence.worker is not None:
        when = more
    elif growth.period == "step":
        when = at
    else:
        when = f"{more}, {at}" if at else more
    return f"{size(evidence.left)} are left {where}: at this rate they are used up {when}"


def limit(evidence: LeakEvidence) -> str:
    """The limit of the holder, if memory ends before it is reached."""
    if evidence.far_limit is None:
        return ""
    items, nbytes = evidence.far_limit
    return f"its limit is {items:,} items, but so many would take {size(nbytes)}"


def rounded(count: int) -> str:
    """To two digits: it is an estimate."""
    digits = len(str(count))
    return f"{round(count, 2 - digits) if digits > 2 else count:,}"


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return (
        word.replace("pass ", "passes ")
        if word.startswith("pass ")
        else f"{word}es"
        if word.endswith("ch")
        else f"{word}s"
    )


def edited(site: Site, part: ast.expr, text: str) -> str:
    """A patch that writes other text for a part of the line; empty where the statement spans several lines."""
    node = site.node
    if node.lineno != (node.end_lineno or node.lineno):
        return ""
    old = source_line(site.file, node.lineno)
    data = old.encode()
    begin, finish = node.col_offset, node.end_col_offset or 0
    new = (data[:begin] + rewritten(site.file, node, [(part, text)]).encode() + data[finish:]).decode()
    name = relative(site.file)
    return f"--- {name}\n+++ {name}\n@@ -{node.lineno} +{node.lineno} @@\n-{old}\n+{new}\n"


def detached(part: ast.expr) -> str:
    """The source of a value without its graph. Not `.item()`: code that reads the value may need a tensor."""
    text = ast.unparse(part)
    if not isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        text = f"({text})"
    return f"{text}.detach()"


def was_warned(autopsy: Autopsy, filler: Filler, codes: tuple[str, ...]) -> bool:
    """Whether one of these warnings named the line that fills it."""
    if autopsy.agent is None:
        return False
    here = filler.location("cause", "")
    told = [each.cause_location for each in read_diagnoses(autopsy.agent.open().path).values() if each.code in codes]
    return any(each is not None and (each.file, each.line) == (here.file, here.line) for each in told)


def grown_meanwhile(autopsy: Autopsy) -> int:
    """Bytes by which the process grew between the first look at its holders and the last.

    Small pieces that are kept between large ones that are freed leave the heap in pieces: little is held, and yet it
    fills the memory.
    """
    looks = autopsy.agent.leaks.looks if autopsy.agent is not None else []
    sizes = [each.device if autopsy.exhaustion.on_device else each.rss for each in looks]
    return max(0, sizes[-1] - sizes[0]) if sizes else 0
