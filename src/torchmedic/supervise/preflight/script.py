"""Checks of the script: what it does that hangs or breaks in the processes that it starts, and where it would wait."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.supervise.preflight.constants import dotted, name_of
from torchmedic.supervise.preflight.facts import Loader, ScriptFacts
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn
from torchmedic.supervise.preflight.importing import Importing

_IMPORTS_AGAIN = ("spawn", "forkserver")
_GUARD = 'put what the script does under `if __name__ == "__main__":`'


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
    return warn("prompts", f"{places}{more}: the run would stand still there", "remove it before a long run")


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
    """Workers that are not forked import the script again; one that then starts workers itself ends them all."""
    importing = Importing(script.sources[0])
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
                "script, which nothing keeps from starting workers again"
            )
            if id(loader.call) in importing.certain and _is_iterated(loader, importing):
                return fail("main guard", f"{reason}: RuntimeError in every one", _GUARD)
            return warn("main guard", reason, _GUARD)
    if script.start not in _IMPORTS_AGAIN and all(loader.start not in _IMPORTS_AGAIN for loader in script.loaders):
        return ok("main guard", f"processes are started by {script.start}, which does not import the script again")
    return ok("main guard", "importing the script starts no processes")


def _started_process(call: ast.Call, script: ScriptFacts) -> str | None:
    """How a call starts processes that import the script, if it does."""
    name = dotted(call.func)
    if name_of(call) == "spawn" and name.split(".")[0] in ("mp", "multiprocessing", "torch") and call.args:
        return "spawn"
    if name_of(call) in ("Pool", "ProcessPoolExecutor") and script.start in _IMPORTS_AGAIN:
        return script.start
    return None


def _is_iterated(loader: Loader, importing: Importing) -> bool:
    """Whether the import certainly goes through the loader, which is what starts its workers."""
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
