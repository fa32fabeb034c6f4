"""Which lines of the user's code put something into a holder, and which take something out or start it anew."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmedic.observe.holders import Held
from torchmedic.replay.frames import syntax_tree
from torchmedic.replay.holder_names import FUNCTIONS, HolderName, called, first_line

_LOOPS = ast.For | ast.AsyncFor | ast.While
_BUILDERS = frozenset({"__init__", "__post_init__", "__new__", "setup", "build", "<module>"})
_NUMBERS = frozenset("item tolist float int len str detach_number".split())


class Site(NamedTuple):
    """A statement or call of the user's, in the function that it stands in."""

    file: str
    node: ast.expr | ast.stmt
    value: ast.expr | None  # what is put in
    path: tuple[ast.AST, ...]  # from the module inwards

    @property
    def function(self) -> ast.AST | None:
        return next((node for node in reversed(self.path) if isinstance(node, FUNCTIONS)), None)

    @property
    def loops(self) -> list[ast.AST]:
        """Around it, in its own function."""
        found: list[ast.AST] = []
        for node in reversed(self.path):
            if isinstance(node, FUNCTIONS):
                break
            if isinstance(node, _LOOPS):
                found.append(node)
        return found

    @property
    def is_number(self) -> bool:
        """Whether what it puts in is plainly a number."""
        value = self.value
        if isinstance(value, ast.Constant | ast.JoinedStr):
            return True
        if isinstance(value, ast.Call):
            name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
            return name in _NUMBERS
        return False

    @property
    def is_guarded(self) -> bool:
        """Whether it fills a cache: it runs only where the key is not there yet."""
        for node in self.path:
            if isinstance(node, ast.If) and any(
                isinstance(part, ast.Compare)
                and any(isinstance(op, ast.NotIn | ast.In | ast.Is | ast.IsNot) for op in part.ops)
                for part in ast.walk(node.test)
            ):
                return True
            if isinstance(node, ast.ExceptHandler) and "KeyError" in (ast.unparse(node.type) if node.type else ""):
                return True
        return False


class Traffic(NamedTuple):
    """What the source says of one holder: who fills it, who empties it, and whether it is filled up to a length."""

    puts: list[Site]
    takes: list[Site]
    is_limited: bool


def traffic(held: Held, files: Iterable[str], depth: int = 2) -> Traffic:
    """Every line that may change a holder, those that put tensors in before those that put in numbers.

    Args:
        held: The holder.
        files: Of the user's.
        depth: Through how many calls it is followed, if it is only handed on.
    """
    name, files = HolderName(held), list(files)
    puts: list[Site] = []
    takes: list[Site] = []
    for file in dict.fromkeys([held.file, *files]) if held.file else files:
        for node, path in _nodes(file):
            if not name.may_stand(file, path):
                continue
            for value in name.puts(node):
                puts.append(Site(file, node, value, path))  # type: ignore[arg-type]
            if name.takes(node):
                takes.append(Site(file, node, None, path))  # type: ignore[arg-type]
            elif (new := name.starts(node)) is not None:
                takes.append(Site(file, node, new, path))  # type: ignore[arg-type]
    if not puts:
        puts = list(_through_arguments(name, held, files, depth))
    # `kept.setdefault(key, []).append(loss)` puts in twice: the whole of it counts.
    longest = {
        (site.file, site.node.lineno): site for site in sorted(puts, key=lambda site: site.node.end_col_offset or 0)
    }
    puts = sorted(longest.values(), key=lambda site: (site.is_number, puts.index(site)))
    starts = [site for site in takes if site.value is not None]
    return Traffic(
        puts,
        [site for site in takes if site.value is None or _again(site, starts)],
        bool(puts) and all(name.limits(site.node.lineno, site.path) for site in puts),
    )


def _through_arguments(name: HolderName, held: Held, files: list[str], depth: int) -> Iterator[Site]:
    """What functions put into it that it is given to, whatever they call it."""
    calls = [
        node
        for file in dict.fromkeys([held.file, *files])
        for node, path in (_nodes(file) if depth and file else ())
        if isinstance(node, ast.Call) and name.may_stand(file, path)
    ]
    for call in calls:
        given = [(number, "") for number, each in enumerate(call.args) if name.is_meant_by(each)]
        given += [(-1, each.arg or "") for each in call.keywords if name.is_meant_by(each.value)]
        for file, function in _functions(called(call), [held.file, *files]) if given else ():
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if isinstance(call.func, ast.Attribute) and parameters[:1] in (["self"], ["cls"]):
                parameters = parameters[1:]
            for number, keyword in given:
                inner = keyword or (parameters[number] if number < len(parameters) else "")
                if inner:
                    as_parameter = held._replace(name=inner, last=inner, file=file, local=first_line(function))
                    yield from traffic(as_parameter, [], depth - 1).puts


def _functions(name: str, files: Iterable[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in dict.fromkeys(files):
        tree = syntax_tree(file) if file else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield file, node


def _again(start: Site, starts: list[Site]) -> bool:
    """Whether a holder is made anew again and again: in a loop, or in a function that is not there to build."""
    if any(isinstance(node, ast.If) and _mentions(node.test, start.node) for node in start.path):
        return False  # `if ema is None: ema = loss`
    if start.loops:
        return True
    function = start.function
    if function is None:
        return False
    is_attribute = isinstance(getattr(start.node, "targets", [None])[0], ast.Attribute)
    return is_attribute and getattr(function, "name", "") not in _BUILDERS and len(starts) > 1


def _mentions(test: ast.expr, assignment: ast.AST) -> bool:
    """Whether a condition is about the very variable that is assigned below it."""
    targets = getattr(assignment, "targets", None) or [getattr(assignment, "target", None)]
    names = {ast.dump(target).replace("Store()", "Load()") for target in targets if target is not None}
    return any(isinstance(part, ast.expr) and ast.dump(part) in names for part in ast.walk(test))


def _nodes(file: str) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    tree = syntax_tree(file)
    return _paths(tree) if tree is not None else []


@functools.lru_cache(maxsize=32)
def _paths(tree: ast.Module) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """The assignments, deletions and calls of a file, each with what stands around it."""
    found: list[tuple[ast.AST, tuple[ast.AST, ...]]] = []
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, path = pending.pop()
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.Call):
            found.append((node, path))
        inner = (
            (*path, node) if isinstance(node, FUNCTIONS | _LOOPS | ast.If | ast.ExceptHandler | ast.ClassDef) else path
        )
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
    return sorted(found, key=lambda entry: (entry[0].lineno, entry[0].col_offset))  # type: ignore[attr-defined]
