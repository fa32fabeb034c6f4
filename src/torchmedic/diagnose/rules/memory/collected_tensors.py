"""A container of the loop collects tensors until memory is full.

What: a list, dict or buffer that the loop fills holds a large part of the memory. The tensors in it have no graph any
more; there are simply too many of them.

Why: outputs, features or batches are collected on the device for a metric at the end; a replay buffer has no bound.

Cure: move what is collected to the host (`.cpu()`), reduce it first (`.argmax()`, `.mean()`), or bound the container.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from torchmedic.diagnose.describe import count
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame, syntax_tree
from torchmedic.replay.memory.autopsy import autopsy_of
from torchmedic.replay.memory.fillers import Filler, fillers_of

CODE, NAME = "TM412", "collected-tensors"

_SHARE = 0.25  # of all tensors
_SEVERAL = 8


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    for holder, nbytes, number in autopsy.holders()[:3]:
        if nbytes < _SHARE * autopsy.book.everything or number < _SEVERAL or autopsy.is_of_failing_call(holder):
            continue
        if nbytes < (autopsy.asked or 0):
            continue
        # It must be the loop that fills it: a data set in memory is filled before.
        filler = next((each for each in fillers_of(holder) if each.in_loop), None)
        if filler is None or not _is_run_again(filler, evidence.frames):
            continue
        draft = Draft(
            CODE,
            NAME,
            "proven",
            f"`{holder.path}` has collected {size(nbytes)} in {count(number, 'tensor')}",
            f"the loop puts in more and takes none out; {size(autopsy.asked or 0)} more were asked for",
        )
        draft.at(filler.location("cause", f"`{holder.path}` is filled here"), *noticed(autopsy))
        shown(draft, autopsy)
        where = "move it to the host first (`.cpu()`)" if autopsy.exhaustion.on_device else "reduce it first"
        draft.help(f"{where}, keep only what is needed later, or bound the container")
        return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)
    return None


def _is_run_again(filler: Filler, frames: Sequence[Frame]) -> bool:
    """Whether a loop that is running now comes by this line: it is in it, or in a function that it calls."""
    for position, frame in enumerate(frames):
        tree = syntax_tree(frame.file, frame.live.f_globals) if frame.is_user else None
        for loop in ast.walk(tree) if tree is not None else ():
            if not isinstance(loop, ast.For | ast.While | ast.AsyncFor) or not _is_in(loop, frame.line):
                continue
            if filler.file == frame.file and _is_in(loop, filler.node.lineno):
                return True
            under_way = {inner.function for inner in frames[position + 1 :] if inner.file == filler.file}
            if not (_called(loop) | under_way).isdisjoint(_functions_around(filler.file, filler.node.lineno)):
                return True
    return False


def _is_in(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _called(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in functions}


def _functions_around(file: str, line: int) -> set[str]:
    tree = syntax_tree(file)
    return {
        node.name
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_in(node, line)
    }


RULE = Rule(CODE, NAME, check)
