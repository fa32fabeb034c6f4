"""The line that makes a DataLoader, by the line that takes its batches; that which shares out the items of a stream."""

from __future__ import annotations

import ast
import re

from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import RankFacts
from torchmedic.source.branches import callees_at
from torchmedic.source.imports import files_behind
from torchmedic.source.syntax import (
    FUNCTIONS,
    LOOPS,
    callee,
    calls_in,
    first_line,
    has_line,
    last_name,
    nodes_in,
    syntax_tree,
)

_SHUFFLES = "RandomSampler"
_SHARES = re.compile(r"rank|world|worker", re.IGNORECASE)  # in a name


def loader_made_at(facts: RankFacts, line: StackFrame) -> tuple[str, int]:
    """The file and the line that make the loader whose batches a line takes; this line itself where that is open."""
    made = _made_in(line.file, line.line) or _made_in_called(facts, line)
    return made if made is not None else (line.file, line.line)


def shared_out_at(stream: StackFrame) -> int:
    """The last line in the `__iter__` of a dataset that chooses items by the rank or worker; else its first line.

    What a loop computes for each item chooses none.
    """
    function = next((each for each in nodes_in(syntax_tree(stream.file)) if _begins(each, stream.line)), None)
    nodes = [*ast.walk(function)] if function is not None else []
    repeated = {id(each) for node in nodes if isinstance(node, LOOPS) for part in node.body for each in ast.walk(part)}
    found = [stream.line]
    for node in nodes:
        chosen = node.iter if isinstance(node, ast.For) else node.test if isinstance(node, ast.If) else None
        chosen = node.value if isinstance(node, ast.Assign) and id(node) not in repeated else chosen
        names = [getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(chosen)] if chosen else []
        if chosen is not None and any(map(_SHARES.search, names)):
            found.append(chosen.lineno)
    return max(found)


def _begins(node: ast.AST, line: int) -> bool:
    return isinstance(node, FUNCTIONS) and first_line(node) == line


def _made_in(file: str, line: int) -> tuple[str, int] | None:
    """The only call in the file, else the one that is bound to a name which the line reads."""
    tree = syntax_tree(file)
    calls = _loaders(tree)
    if len(calls) > 1:
        bound = _bound(file, line)
        calls = [call for call in calls if any(has_line(each, call.lineno) for each in bound)]
    return (file, calls[0].lineno) if len(calls) == 1 else None


def _made_in_called(facts: RankFacts, line: StackFrame) -> tuple[str, int] | None:
    """The only call in a function that makes what the line reads, in any file that the lines of the rank lead to.

    Where no such function is found, it is the only call in these files that fits what has drawn the batches.
    """
    known = (line, facts.wrapped_at, facts.calling, facts.updating)
    files = files_behind(each.file for each in known if each is not None)
    names = {callee(call) for each in _bound(line.file, line.line) for call in calls_in(each)} - {""}
    names |= callees_at(line.file, line.line)
    functions = [
        (file, node)
        for file in files
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, FUNCTIONS) and node.name in names
    ]
    called = [(file, call.lineno) for file, node in functions for call in _loaders(node) if _may_draw(call, facts)]
    everywhere = [
        (file, call.lineno) for file in files for call in _loaders(syntax_tree(file)) if _may_draw(call, facts)
    ]
    found = called or everywhere
    return found[0] if len(found) == 1 else None


def _loaders(tree: ast.AST | None) -> list[ast.Call]:
    return [each for each in calls_in(tree) if callee(each).endswith("DataLoader")]


def _bound(file: str, line: int) -> list[ast.Assign]:
    """The assignments to the last names that a line reads."""
    nodes = [*nodes_in(syntax_tree(file))]
    taken = {last_name(each) for each in nodes if getattr(each, "lineno", 0) == line} - {""}
    return [each for each in nodes if isinstance(each, ast.Assign) and taken & set(map(last_name, each.targets))]


def _may_draw(call: ast.Call, facts: RankFacts) -> bool:
    """Whether a loader that is made so may draw its batches as they were drawn."""
    given = {word.arg: word.value for word in call.keywords}
    if "sampler" in given or "batch_sampler" in given or len(call.args) > 2:
        return True  # the third argument is `shuffle`
    shuffle = given.get("shuffle")
    if shuffle is None:
        return facts.sampler != _SHUFFLES or None in given  # `**settings` may hold anything
    return not isinstance(shuffle, ast.Constant) or bool(shuffle.value) == (facts.sampler == _SHUFFLES)
