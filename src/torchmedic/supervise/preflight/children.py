"""The functions of a script that run in other processes: in DataLoader workers, and in processes made by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from torchmedic.supervise.preflight.constants import Constants, name_of
from torchmedic.supervise.preflight.facts import Loader, ScriptFacts
from torchmedic.supervise.preflight.sources import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FETCHES = ("__getitem__", "__getitems__", "__iter__", "__next__")


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """`Process(target=function, args=(...))`, with the nodes above it in the file that are not the child's own."""

    source: Source
    call: ast.Call
    function: Function
    start: str
    above: list[ast.AST]

    @property
    def arguments(self) -> dict[str, str]:
        """Variable names in `args`, and the names of the matching parameters."""
        given = next((word.value for word in self.call.keywords if word.arg == "args"), None)
        names = [name_of(each) for each in given.elts] if isinstance(given, ast.Tuple | ast.List) else []
        return {name: known.arg for name, known in zip(names, self.function.args.args, strict=False) if name}


def forked_loaders(script: ScriptFacts) -> list[Loader]:
    return [loader for loader in script.loaders if loader.workers and loader.start == "fork"]


def run_by_workers(script: ScriptFacts, loaders: list[Loader]) -> Iterator[tuple[Source, Function]]:
    """Functions that workers call: methods of the dataset (of all datasets, if it is unknown), and given callbacks."""
    kinds = {_class_of(loader.arguments.get("dataset"), script.constants) for loader in loaders}
    words = ("collate_fn", "worker_init_fn")
    given = {name_of(loader.arguments[word]) for loader in loaders for word in words if word in loader.arguments}
    nodes = [(source, node) for source in script.sources for node in ast.walk(source.tree)]
    classes = {node.name for _, node in nodes if isinstance(node, ast.ClassDef)}
    for source, node in nodes:
        if isinstance(node, ast.ClassDef) and (node.name in kinds or not kinds <= classes):
            yield from ((source, each) for each in node.body if isinstance(each, Function) and each.name in _FETCHES)
        elif isinstance(node, Function) and node.name in given:
            yield source, node


def _class_of(dataset: ast.expr | None, constants: Constants) -> str:
    made = constants.expression(dataset)
    return name_of(made) if isinstance(made, ast.Call) else ""


def children(script: ScriptFacts, kind: str = "Process") -> Iterator[Child]:
    """Processes that run a function of the same file; or threads, if `kind` is `Thread`."""
    for source in script.sources:
        functions = {node.name: node for node in ast.walk(source.tree) if isinstance(node, Function)}
        targets: dict[int, Function] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and name_of(node) == kind:
                target = next((word.value for word in node.keywords if word.arg == "target"), None)
                if target is not None and name_of(target) in functions:
                    targets[id(node)] = functions[name_of(target)]
        theirs = {id(node) for function in targets.values() for node in ast.walk(function)}
        above: list[ast.AST] = []
        for node in in_order(source.tree) if targets else ():
            if isinstance(node, ast.Call) and id(node) in targets:
                start = _start(node, script)
                yield Child(source=source, call=node, function=targets[id(node)], start=start, above=list(above))
            elif id(node) not in theirs:
                above.append(node)


def _start(call: ast.Call, script: ScriptFacts) -> str:
    """The start method of a process: that of its context, if it is made from one."""
    if not isinstance(call.func, ast.Attribute) or name_of(call.func.value) in ("mp", "multiprocessing"):
        return script.start
    context = script.constants.known(call.func.value)
    return context if isinstance(context, str) else ""


def in_order(tree: ast.AST) -> list[ast.AST]:
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]
