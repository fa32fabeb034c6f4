"""Whether a holder is filled only while it is short: the source compares its length, or counts, before it adds."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.leaks.source.sites import Site
from torchmedic.source.assignments import sides, terms
from torchmedic.source.syntax import LEAVING, Path, callee, function_around, nodes_in
from torchmedic.source.vocabulary import calls_backward


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
