"""Checks of the script: prompts, settings that come too late, and processes that are started when it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchmedic.supervise.preflight.constants import dotted, name_of
from torchmedic.supervise.preflight.facts import Loader, ScriptFacts
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn
from torchmedic.supervise.preflight.sources import Source

_IMPORTS_AGAIN = ("spawn", "forkserver")
_GUARD = 'put what the script does under `if __name__ == "__main__":`'
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CONDITIONAL = (ast.If, ast.Try, ast.While, ast.Match, ast.ExceptHandler)


def check(situation: Situation) -> Iterator[Finding]:
    script = situation.script
    if script is None:
        return
    yield _prompts(script, situation)
    yield _late_settings(script)
    yield _guard(script)


def _prompts(script: ScriptFacts, situation: Situation) -> Finding:
    found = script.prompts
    if situation.environ.get("PYTHONBREAKPOINT") == "0":
        found = [prompt for prompt in found if prompt[1] != "breakpoint()"]
    if not found:
        return ok("prompts", "nothing in the script waits for a keyboard")
    places = ", ".join(f"`{what}` at {place}" for place, what in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return warn("prompts", f"{places}{more}: the run would wait there", "remove it before a long run")


def _late_settings(script: ScriptFacts) -> Finding:
    if not script.late_settings:
        return ok("OpenMP settings", "none is set after torch has read them")
    place, name = script.late_settings[0]
    return warn(
        "OpenMP settings",
        f"{place} sets {name} after torch was imported, which is too late to have an effect",
        "set it above the first import of torch, or call torch.set_num_threads",
    )


def _guard(script: ScriptFacts) -> Finding:
    """Check the main guard. Workers that are not forked import the script again, which must not start workers."""
    importing = _Importing(script.sources[0])
    reached = {id(node) for node in importing.nodes}
    for call in (node for node in importing.nodes if isinstance(node, ast.Call)):
        started = _started_process(call, script)
        if started is not None:
            place = script.sources[0].at(call)
            reason = f"{place} starts processes by {started} when the script is imported, and each of them imports it"
            if id(call) in importing.certain:
                return fail("main guard", f"{reason}: RuntimeError in every one", _GUARD)
            return warn("main guard", reason, _GUARD)
    for loader in script.loaders:
        if loader.start in _IMPORTS_AGAIN and loader.workers and id(loader.call) in reached:
            reason = (
                f"{loader.place} has {loader.workers} workers, started by {loader.start}; each of them imports the "
                "script, which then starts workers again"
            )
            if id(loader.call) in importing.certain and _is_iterated(loader, importing):
                return fail("main guard", f"{reason}: RuntimeError in every one", _GUARD)
            return warn("main guard", reason, _GUARD)
    if script.start not in _IMPORTS_AGAIN and all(loader.start not in _IMPORTS_AGAIN for loader in script.loaders):
        return ok("main guard", f"processes are started by {script.start}, which does not import the script again")
    return ok("main guard", "importing the script starts no processes")


def _started_process(call: ast.Call, script: ScriptFacts) -> str | None:
    """The start method of a call that starts processes which import the script; None for other calls."""
    name = dotted(call.func)
    if name_of(call) == "spawn" and name.split(".")[0] in ("mp", "multiprocessing", "torch") and call.args:
        return "spawn"
    if name_of(call) in ("Pool", "ProcessPoolExecutor") and script.start in _IMPORTS_AGAIN:
        return script.start
    return None


def _is_iterated(loader: Loader, importing: _Importing) -> bool:
    """Whether the import certainly iterates over the loader, which starts its workers."""
    names = {
        name_of(target)
        for node in importing.nodes
        if isinstance(node, ast.Assign) and node.value is loader.call
        for target in node.targets
    }
    for node in importing.nodes:
        if id(node) not in importing.certain:
            continue
        over = node.iter if isinstance(node, ast.For) else node if name_of(node) == "iter" else None
        if over is not None and any(each is loader.call or name_of(each) in names - {""} for each in ast.walk(over)):
            return True
    return False


def _is_guard(node: ast.AST) -> bool:
    """Whether a node is `if __name__ == "__main__":`."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq)):
        return False
    sides = [node.test.left, *node.test.comparators]
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


class _Importing:
    """The nodes that run when a process that is not forked imports the script again.

    These are the top level and the functions called from there, without what the main guard excludes.
    """

    def __init__(self, script: Source) -> None:
        self._functions: dict[str, list[_Function]] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, _Function):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, _Function) and each.name == "__init__"]
                self._functions.setdefault(node.name, []).extend(made)
        self._entered: set[int] = set()
        self.certain: set[int] = set()  # ids of nodes that are reached unconditionally
        self.nodes: list[ast.AST] = list(self._follow(script.tree.body, certain=True))

    def _follow(self, statements: Iterable[ast.AST], *, certain: bool) -> Iterator[ast.AST]:
        for node in statements:
            if _is_guard(node):
                assert isinstance(node, ast.If)
                yield from self._follow(node.orelse, certain=False)
            elif isinstance(node, _Function | ast.Lambda):
                continue
            else:
                if certain:
                    self.certain.add(id(node))
                yield node
                inner = certain and not isinstance(node, _CONDITIONAL)
                yield from self._follow(ast.iter_child_nodes(node), certain=inner)
                if isinstance(node, ast.Call):
                    yield from self._enter(node, certain=certain)

    def _enter(self, call: ast.Call, *, certain: bool) -> Iterator[ast.AST]:
        known = self._functions.get(name_of(call), [])
        for function in known:
            if id(function) not in self._entered:
                self._entered.add(id(function))
                yield from self._follow(function.body, certain=certain and len(known) == 1)
