"""A container of the loop collects tensors until memory is full.

What: a list, dict or buffer that the loop fills holds a large part of the memory. The tensors in it have no graph any
more; there are simply too many of them.

Why: outputs, features or batches are collected on the device for a metric at the end; a replay buffer has no bound.

Cure: move what is collected to the host (`.cpu()`), reduce it first (`.argmax()`, `.mean()`), or bound the container.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.describe import count
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import syntax_tree
from torchmedic.replay.memory.autopsy import autopsy_of
from torchmedic.replay.memory.fillers import fillers_of
from torchmedic.replay.step import Step

CODE, NAME = "TM412", "collected-tensors"

_SHARE = 0.25  # of all tensors
_SEVERAL = 8


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    step = autopsy.step
    for holder, nbytes, number in autopsy.holders()[:3]:
        if nbytes < _SHARE * autopsy.book.everything or number < _SEVERAL or autopsy.is_of_failing_call(holder):
            continue
        if nbytes < (autopsy.asked or 0):
            continue
        # It must be the loop that fills it: a data set in memory is filled before.
        filler = next((each for each in fillers_of(holder) if each.in_loop), None)
        if filler is None or step is None or not _is_run_again(filler.file, filler.node.lineno, step):
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


def _is_run_again(file: str, line: int, step: Step) -> bool:
    """Whether a line stands in the loop of the step, or in a function that this loop calls by its name."""
    segment, frame = step.segment, step.frame
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    first = segment.lines[0]
    loop = next((node for node in _loops(tree) if node.body[0].lineno == first), None) if tree is not None else None
    if loop is None:
        return False
    if file == frame.f_code.co_filename and first <= line <= (loop.end_lineno or line):
        return True
    return not _called(loop).isdisjoint(_functions_around(file, line))


def _loops(tree: ast.AST) -> list[ast.For | ast.While | ast.AsyncFor]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]


def _called(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in functions}


def _functions_around(file: str, line: int) -> set[str]:
    tree = syntax_tree(file)
    return {
        node.name
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    }


RULE = Rule(CODE, NAME, check)
