"""The branches and loops around a line: which `if` it depends on, and which `if` leaves its loop before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from torchmedic.source.syntax import FUNCTIONS, LOOPS, blocks, callee, calls_in, nodes_in, spans_block, syntax_tree

Exit = Literal["continue", "break", "return", "raise"]

_EXITS = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return", ast.Raise: "raise"}
_RANK = re.compile(
    r"(?<![a-z])rank(?![a-z])|is_((global|world|local|process)_)*(main|zero|first|master|lead|chief|root)"
    r"|process_index|on_main|main_process"
)


class Branch(NamedTuple):
    """An `if`. `taken` is whether the line is in its body; else it is in its `else`.

    The handler of an exception is a branch too if it leaves the block; its `test` begins with `except`.
    """

    line: int
    test: str
    taken: bool
    by_rank: bool
    exit: Exit | None = None

    @property
    def side(self) -> tuple[str, bool]:
        """What holds for the line, in a form that `rank != 0` and the `else` of `rank == 0` have in common."""
        test, holds = self.test, self.taken != (self.exit is not None)  # behind an exit, its test does not hold
        for negated, plain in (("!=", "=="), (" > 0", " == 0")):
            if negated in test:
                test, holds = test.replace(negated, plain), not holds
        return (test[4:], not holds) if test.startswith("not ") else (test, holds)

    @property
    def header(self) -> str:
        return self.test if self.test.startswith("except") else f"if {self.test}"

    @property
    def only_by_rank(self) -> bool:
        """Whether nothing but the rank decides: such a test has the same result every time."""
        test = ast.parse(self.test, mode="eval").body
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        return all(_RANK.search(ast.unparse(part)) for part in parts)


class Loop(NamedTuple):
    """A loop. `exits` are the branches that leave it before its end."""

    line: int
    end: int
    header: str
    exits: tuple[Branch, ...]


def branches_around(file: str, line: int) -> list[Branch]:
    """The `if` statements of the same function that a line depends on, innermost first.

    `f() if test else x` and `test and f()` are branches, too.
    """
    around = nodes_around(file, line)
    found = [
        _branch(node, taken=holds(node.body, line))
        for node in around
        if isinstance(node, ast.If) and (holds(node.body, line) or holds(node.orelse, line))
    ]
    if around and isinstance(around[-1], ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
        found.extend(_branches_in(around[-1]))
    return [branch for branch in found[::-1] if "__name__" not in branch.test]  # the guard of a script


def _branches_in(statement: ast.stmt) -> Iterator[Branch]:
    """The tests in a statement that one of its calls depends on."""
    for node in ast.walk(statement):
        if isinstance(node, ast.IfExp):
            one, other = _has_call(node.body), _has_call(node.orelse)
            if one != other:
                yield _tested(node.lineno, node.test, taken=one)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.BoolOp):
        *tests, last = statement.value.values
        if isinstance(statement.value.op, ast.And) and isinstance(last, ast.Call) and len(tests) == 1:
            yield _tested(statement.lineno, tests[0], taken=True)


def _has_call(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def exits_before(file: str, line: int) -> list[Branch]:
    """The `if` statements in front of a line after which it is not reached, the nearest first.

    Handlers of a `try` around the line are last: an exception in front of the line may have led to one of them.
    """
    found: list[Branch] = []
    handlers: list[Branch] = []
    for node in nodes_around(file, line):
        if isinstance(node, ast.Try) and holds(node.body, line):
            handlers = [each for each in _handlers(node) if each.exit in ("continue", "return")] + handlers
        for block in blocks(node) if isinstance(node, ast.stmt) else [getattr(node, "body", [])]:
            if holds(block, line):
                for statement in block:
                    if (statement.end_lineno or statement.lineno) < line:
                        found.extend(_exits(statement))
    return [*sorted(found, key=lambda branch: -branch.line), *handlers]


def loops_around(file: str, line: int) -> list[Loop]:
    """The loops of the same function that run a line, innermost first."""
    found = []
    for node in nodes_around(file, line):
        if isinstance(node, LOOPS) and (holds(node.body, line) or line == node.lineno):
            exits = tuple(branch for each in node.body for branch in _exits(each) if branch.exit != "continue")
            found.append(Loop(node.lineno, node.end_lineno or node.lineno, _header(node), exits))
    return found[::-1]


def flags_of_loop(file: str, loop: Loop) -> set[str]:
    """The attributes that decide whether a loop goes on: those of its header and its exits, and what they compute."""
    tests = [loop.header.partition("while ")[2], *(branch.test for branch in loop.exits)]
    tests = [test for test in tests if test and not test.startswith("except")]
    names = {name for test in tests for name in _attributes(ast.parse(test, mode="eval"))}
    for node in nodes_in(syntax_tree(file)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            names = names | _attributes(node)
    return names


def _attributes(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def assignments_of(file: str, names: set[str]) -> list[tuple[int, str]]:
    """The lines of a file that set one of these attributes to something true; with the name."""
    return [
        (node.lineno, target.attr)
        for node in nodes_in(syntax_tree(file))
        if isinstance(node, ast.Assign) and not (isinstance(node.value, ast.Constant) and not node.value.value)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr in names
    ]


def process_ends(file: str, loop: Loop) -> list[int]:
    """The lines in a loop, or in functions of the same file that it calls, that end the process: `sys.exit()`.

    So do those in an `except` around the loop, or around a call of the function that holds the loop.
    """
    nodes = list(nodes_in(syntax_tree(file)))
    todo: list[ast.AST] = [node for node in nodes if isinstance(node, LOOPS) and node.lineno == loop.line]
    holders = {name for name, node in _functions(file).items() if node.lineno <= loop.line <= (node.end_lineno or 0)}
    for tried in (node for node in nodes if isinstance(node, ast.Try)):
        for statement in tried.body:
            is_around = statement.lineno <= loop.line <= (statement.end_lineno or 0)
            if is_around or (holders and any(True for _ in calls_in(statement, *holders))):
                todo += tried.handlers
    return _ends_in(file, todo)


def process_ends_between(file: str, first: int, last: int) -> list[int]:
    """The lines that end the process, in the statements between two lines or in functions that these call."""
    nodes = [node for node in nodes_in(syntax_tree(file)) if isinstance(node, ast.stmt)]
    return _ends_in(file, [node for node in nodes if first < node.lineno <= (node.end_lineno or node.lineno) < last])


def call_in_called(file: str, line: int, name: str) -> tuple[str, int] | None:
    """The function of the file that a line calls and that calls another one of a name: its own name, and that line.

    A function in between may make the call: then its line is given.
    """
    functions = _functions(file)
    for called in callees_at(file, line) & functions.keys():
        inner = {other for other in functions if any(True for _ in calls_in(functions[other], name))}
        made = [*calls_in(functions[called], name)] or [*calls_in(functions[called], *inner)] if inner else []
        if made:
            return called, made[-1].lineno
    return None


def _functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = nodes_in(syntax_tree(file))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _ends_in(file: str, todo: list[ast.AST]) -> list[int]:
    functions, found = _functions(file), set[int]()
    for part in todo:  # grows
        for node in ast.walk(part):
            name = callee(node) if isinstance(node, ast.Call) else None
            if name in ("exit", "_exit", "quit") or (isinstance(node, ast.Raise) and _is_exit(node.exc)):
                found.add(node.lineno)  # type: ignore[attr-defined]
            elif name in functions and functions[name] not in todo:
                todo.append(functions[name])
    return sorted(found)


def _is_exit(raised: ast.expr | None) -> bool:
    kind = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(kind, ast.Name) and kind.id == "SystemExit"


def calls_by_rank(file: str, wanted: Callable[[str], bool]) -> list[int]:
    """The lines that only some ranks reach, with a call of a wanted name, else of a function that leads to one."""
    names = wanted
    for _ in range(4):  # calls from one function to the next
        lines = sorted({node.lineno for node in calls_in(syntax_tree(file)) if names(callee(node))})
        if found := [line for line in lines if any(each.by_rank for each in branches_around(file, line))]:
            return found
        leads = [name for name, node in _functions(file).items() if any(map(names, map(callee, calls_in(node))))]
        names = leads.__contains__
    return []


def callees_at(file: str, line: int) -> set[str]:
    """The names of the functions that a line calls."""
    calls = (node for node in nodes_in(syntax_tree(file)) if isinstance(node, ast.Call) and spans(node, line))
    return {name for name in map(callee, calls) if name}


def nodes_around(file: str, line: int) -> list[ast.AST]:
    """The nodes with statements that hold a line, from its function inwards."""
    tree = syntax_tree(file)
    path: list[ast.AST] = [tree] if tree is not None else []
    while path:
        inner = next(
            (
                child
                for child in ast.iter_child_nodes(path[-1])
                if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and spans(child, line)
            ),
            None,
        )
        if inner is None:
            break
        path.append(inner)
    start = max((at for at, node in enumerate(path) if isinstance(node, FUNCTIONS)), default=0)
    return path[start:]


def spans(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return holds(node.body, line)
    start, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
    return start <= line <= end


def holds(block: list[ast.stmt], line: int) -> bool:
    return bool(block) and spans_block(block, {line})


def _branch(node: ast.If, *, taken: bool, exit: Exit | None = None) -> Branch:
    return _tested(node.lineno, node.test, taken=taken, exit=exit)


def _tested(line: int, node: ast.expr, *, taken: bool, exit: Exit | None = None) -> Branch:
    test = ast.unparse(node)
    return Branch(line, test, taken, bool(_RANK.search(test)), exit)


def _exits(statement: ast.stmt) -> Iterator[Branch]:
    """The branches in a statement whose body ends in `continue`, `break`, `return` or `raise`."""
    if isinstance(statement, FUNCTIONS | ast.ClassDef):
        return
    if isinstance(statement, ast.If):
        for block, taken in ((statement.body, True), (statement.orelse, False)):
            kind = _EXITS.get(type(block[-1])) if block else None
            if kind is not None:
                yield _branch(statement, taken=taken, exit=kind)  # type: ignore[arg-type]
    if isinstance(statement, ast.Try):
        yield from (
            found
            for handler, found in zip(statement.handlers, _handlers(statement), strict=True)
            if isinstance(handler.body[-1], tuple(_EXITS)) and found.exit != "raise"
        )
    inner = isinstance(statement, LOOPS)
    for block in blocks(statement):
        for each in block:
            for found in _exits(each):
                if not (inner and found.exit in ("break", "continue")):
                    yield found


def _handlers(node: ast.Try) -> Iterator[Branch]:
    """The handlers of a `try`. One that leaves nothing leaves out the rest of the `try`, as `continue` does."""
    for handler in node.handlers:
        test = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
        kind = _EXITS.get(type(handler.body[-1]), "continue")
        yield Branch(handler.lineno, test, True, False, kind)  # type: ignore[arg-type]


def _header(node: ast.For | ast.AsyncFor | ast.While) -> str:
    if isinstance(node, ast.While):
        return f"while {ast.unparse(node.test)}"
    return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
