"""Whether the source keeps a holder short: it compares the length before it adds, or starts the holder anew."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site, nodes_of
from torchmedic.source.assignments import flat, sides, terms
from torchmedic.source.syntax import LEAVING, Path, callee, calls_backward, function_around, nodes_in


def is_limited(name: HolderName, site: Site) -> bool:
    """Whether a line that fills a holder is passed only while the holder is short."""
    name = name.at(site.path)
    inside = list(nodes_in(function_around(site.path)))
    known = _measures(name, site.path)
    known |= {
        target.id
        for node in inside
        if isinstance(node, ast.Assign) and _is_length(node.value, name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in site.path:
        if isinstance(node, ast.If | ast.While) and _compares_length(node.test, name, known):
            return True
        # A branch that trains and counts its steps says when to train, not what to keep.
        if isinstance(node, ast.If) and _counts_up_to_number(node) and not calls_backward(node):
            return True
    return any(
        isinstance(node, ast.If)
        and node.lineno < site.node.lineno
        and isinstance(node.body[-1], LEAVING)
        and _compares_length(node.test, name, known)
        for node in inside
    )


def _measures(name: HolderName, path: Path) -> set[str]:
    """The expressions that tell the length in the class around: `len(self)`, `self.size`, `self.is_full says`."""
    found = set()
    for method in (each for owner in path if isinstance(owner, ast.ClassDef) for each in owner.body):
        if isinstance(method, ast.FunctionDef):
            returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return) and node.value]
            if returned and all(_is_length(each, name) for each in returned):
                found.add("len(self)" if method.name == "__len__" else f"self.{method.name}")
            elif returned and all(_compares_length(each, name, ()) for each in returned):
                found.add(f"self.{method.name} says")
    return found


def _compares_length(test: ast.expr, name: HolderName, known: Iterable[str]) -> bool:
    return any(
        (isinstance(part, ast.Compare) and any(_is_length(side, name, known) for side in sides(part)))
        or (isinstance(part, ast.Attribute) and f"{ast.unparse(part)} says" in known)
        for part in ast.walk(test)
    )


def _is_length(value: ast.expr, name: HolderName, known: Iterable[str] = ()) -> bool:
    return any(
        (isinstance(part, ast.Call) and callee(part) == "len" and bool(part.args) and name.matches(part.args[0]))
        or ast.unparse(part).removesuffix("()") in known
        for part in terms(value)
    )


def _counts_up_to_number(branch: ast.If) -> bool:
    """Whether a branch counts how often it is taken, up to a limit: `if self.count < self.most: self.count += 1`."""
    test = branch.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    left, right = test.left, test.comparators[0]
    if isinstance(test.ops[0], ast.Gt | ast.GtE):
        left, right = right, left
    elif not isinstance(test.ops[0], ast.Lt | ast.LtE):
        return False
    return _is_counted(left, branch.body) or _is_counted(right, branch.orelse)


def _is_counted(name: ast.expr, body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and ast.unparse(node.target) == ast.unparse(name)
        for statement in body
        for node in ast.walk(statement)
    )


def begins_again(start: Site, starts: list[Site], puts: list[Site], files: list[str]) -> bool:
    """Whether a line makes a holder anew again and again."""
    if any(isinstance(node, ast.If) and _asks_for_none(node.test, start.node) for node in start.path):
        return False  # `if ema is None: ema = loss`
    targets = list(flat(getattr(start.node, "targets", [])))
    is_item = isinstance(start.node, ast.Call) or any(isinstance(each, ast.Subscript) for each in targets)
    if is_item and start.is_guarded:
        return False  # `if name not in history: history[name] = []`
    filled = [loop for site in puts for loop in site.path]
    if any(loop in filled for loop in start.loops):
        return True
    function = start.function
    if function is None:
        return False
    if start.builds:
        return _is_built_again(start, files)
    is_attribute = any(isinstance(each, ast.Attribute) for each in targets)
    return (is_attribute and len(starts) > 1) or ((is_attribute or is_item) and _is_called_again(start, files))


def _is_built_again(start: Site, files: list[str]) -> bool:
    """Whether `__init__` is called once more on an object that exists: `meter.__init__()`."""
    for file in dict.fromkeys([start.file, *files]):
        for node, _ in nodes_of(file):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="__init__", value=ast.Name(id=whose) | ast.Attribute(attr=whose))
                ):
                    names = [getattr(each, "id", "") for each in node.args]
                    if "self" not in names and whose[:1].islower():  # not `Base.__init__(self)`
                        return True
    return False


def _is_called_again(start: Site, files: list[str]) -> bool:
    """Whether the function that makes it anew is called at several places, or in a loop: `meter.reset()`."""
    name = getattr(start.function, "name", "")
    owner = next((each for each in reversed(start.path) if isinstance(each, ast.ClassDef)), None)
    calls = []
    for file in dict.fromkeys([start.file, *files]):
        for node, path in nodes_of(file):
            match node:
                case ast.Call(func=ast.Attribute(attr=attribute, value=whose)) if attribute == name:
                    is_own = isinstance(whose, ast.Name) and whose.id == "self"
                    calls += [Site(file, node, None, path)] if not is_own or owner in path else []
                case ast.Call(func=ast.Name(id=function)) if function == name and owner is None:
                    calls.append(Site(file, node, None, path))
    return len(calls) > 1 or any(site.loops for site in calls)


def _asks_for_none(test: ast.expr, assignment: ast.AST) -> bool:
    """Whether a condition asks if the variable that is assigned below it has no value yet."""
    targets = getattr(assignment, "targets", None) or [getattr(assignment, "target", None)]
    names = {ast.dump(target).replace("Store()", "Load()") for target in targets if target is not None}
    for part in ast.walk(test):
        match part:
            case ast.UnaryOp(op=ast.Not(), operand=asked) if ast.dump(asked) in names:
                return True
            case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot() | ast.Eq()]) if ast.dump(asked) in names:
                return True
    return False
