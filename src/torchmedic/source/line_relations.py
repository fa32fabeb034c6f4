"""How lines of one file lie to each other: in one block, in one `try`, on both sides of a test; and what lines set."""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchmedic.source.assignments import items_written
from torchmedic.source.branches import Branch, branches_around, exits_before, holds, nodes_around, spans
from torchmedic.source.syntax import FUNCTIONS, blocks, callee, calls_in, last_name, nodes_in, syntax_tree


def is_on_both_sides(file: str, line: int, branch: Branch, name: str) -> bool:
    """Whether the function of a line calls `name` on the other side of a test about the rank, too."""
    return bool(_lines_on_other_side(file, line, branch, name))


def exits_before_other_side(file: str, line: int, name: str) -> list[Branch]:
    """The exits after which some ranks do not come to their own call of `name`, while others make it at this line.

    Such are the `return` between `if rank != 0: barrier()` and `if rank == 0: barrier()`, the nearest first.
    """
    passed = exits_before(file, line)
    return [
        each
        for branch in branches_around(file, line)
        if branch.by_rank
        for other in _lines_on_other_side(file, line, branch, name)
        for each in exits_before(file, other)
        if each not in passed and not each.by_rank and each.exit != "raise"
    ]


def _lines_on_other_side(file: str, line: int, branch: Branch, name: str) -> list[int]:
    test, is_true = branch.side
    around = next(iter(nodes_around(file, line)), None)
    calls = (node for node in ast.walk(around) if isinstance(node, ast.Call)) if around is not None else ()
    others = sorted({call.lineno for call in calls if callee(call) == name and call.lineno != line})
    return [other for other in others if any(each.side == (test, not is_true) for each in branches_around(file, other))]


def follows_in_block(file: str, line: int, other: int) -> bool:
    """Whether two lines are in statements of one block, so that a run comes to the later one after the first."""
    for node in reversed(nodes_around(file, line)):
        for block in blocks(node) if isinstance(node, ast.stmt) else [getattr(node, "body", [])]:
            if holds(block, line) and holds(block, other):
                return not any(spans(each, line) and spans(each, other) for each in block)
    return False


def in_one_try(file: str, line: int, other: int) -> bool:
    """Whether two lines are in the body of one `try` or `with` statement."""
    around = (node for node in nodes_in(syntax_tree(file)) if isinstance(node, ast.Try | ast.With | ast.AsyncWith))
    return any(holds(node.body, line) and holds(node.body, other) for node in around)


def in_comprehension(file: str, line: int) -> bool:
    """Whether a line is a part of a comprehension or generator expression."""
    return bool(_comprehensions(file, line))


def asks_for_gradient(file: str, line: int) -> bool:
    """Whether a line is run only for what has a gradient: `if p.grad is not None`, around it or in a comprehension."""
    tests = [test for node in _comprehensions(file, line) for part in node.generators for test in part.ifs]
    tests += [node.test for node in nodes_around(file, line) if isinstance(node, ast.If)]
    return any(isinstance(node, ast.Attribute) and node.attr == "grad" for test in tests for node in ast.walk(test))


def _comprehensions(file: str, line: int) -> list[ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp]:
    kinds = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    return [node for node in nodes_in(syntax_tree(file)) if isinstance(node, kinds) and spans(node, line)]


def is_after_in_block(file: str, line: int, names: set[str]) -> bool:
    """Whether a function with one of these names is called below `line`, in the same block and under no other `if`."""
    for node in reversed(nodes_around(file, line)):
        for block in blocks(node) if isinstance(node, ast.stmt) else [getattr(node, "body", [])]:
            if holds(block, line):
                below = [each for each in block if each.lineno > line and not isinstance(each, ast.If)]
                calls = [node for each in below for node in ast.walk(each) if isinstance(node, ast.Call)]
                return any(callee(call) in names for call in calls)
    return False


def lines_that_set(file: str, key: str) -> list[int]:
    """The lines that assign to an item with this key: `group["lr"] = rate`."""
    return [node.lineno for node, item in items_written(syntax_tree(file)) if ast.unparse(item.slice) == repr(key)]


def lines_that_prepare(file: str) -> list[int]:
    """The lines that let a library prepare objects: `optimizer, loader = accelerator.prepare(optimizer, loader)`."""
    return [
        node.lineno
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args
        if isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "prepare"
    ]


def trained_models(file: str) -> list[int]:
    """The lines that assign what an optimizer of the file is given as `model.parameters()`."""
    tree = syntax_tree(file)
    given = {
        ast.unparse(node.func.value)
        for call in nodes_in(tree)
        if isinstance(call, ast.Call)
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        for node in ast.walk(argument)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"
    }
    return sorted(
        node.lineno
        for node in nodes_in(tree)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) in given for target in node.targets)
    )


def calls_below(file: str, line: int, wanted: Callable[[str], bool]) -> list[int]:
    """The lines below an assignment, in its function, that pass on what was assigned to a call of a wanted name.

    The call may be in a function of the file that the line names.
    """
    around = nodes_around(file, line)
    assigned = around[-1] if around and isinstance(around[-1], ast.Assign) else None
    names = {last_name(each) for each in assigned.targets} if assigned is not None else set()
    functions = {node.name: node for node in nodes_in(syntax_tree(file)) if isinstance(node, FUNCTIONS)}
    leading = {name for name, node in functions.items() if any(wanted(callee(each)) for each in calls_in(node))}
    found: set[int] = set()
    for call in (each for each in calls_in(around[0] if around else None) if each.lineno > line):
        parts = {last_name(each) for each in ast.walk(call)}
        if names & parts and (wanted(callee(call)) or leading & parts):
            found.add(call.lineno)
    return sorted(found)


def reads_attribute(file: str, line: int, name: str) -> bool:
    """Whether a line reads an attribute of this name."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and node.lineno == line
        for node in nodes_in(syntax_tree(file))
    )
