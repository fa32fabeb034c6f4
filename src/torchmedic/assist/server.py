"""The MCP server: names, descriptions and arguments of the tools. `reading` and `running` do the work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from torchmedic import __version__
from torchmedic.assist import reading, running
from torchmedic.assist.reading import ReportFormat
from torchmedic.assist.running import Runs
from torchmedic.errors import TorchmedicError
from torchmedic.records.plain_text import visible

P = ParamSpec("P")
T = TypeVar("T")

_INSTRUCTIONS = """\
torchmedic explains why a PyTorch training script failed: cause, line, evidence, and cures that were tried on the
failing step. Begin with `report`. A finding marked proven was shown by a replay; do not doubt it without evidence. Read
the lines with `source_context` before you write a patch."""
_MAY_RUN = """ `run` starts a script and keeps its failing step alive; `try_cure` runs that step with your patch, so
test a patch there before you change a file. Call `stop` when you are done."""


def build(base: Path, *, allow_run: bool) -> tuple[MCPServer[Any], Runs]:
    """The server for the scripts below a folder, and the runs that it starts.

    Args:
        base: Paths in the arguments of tools are relative to it.
        allow_run: Whether there are tools that run code of the user's.
    """
    server: MCPServer[Any] = MCPServer(
        "torchmedic",
        version=__version__,
        instructions=_INSTRUCTIONS + (_MAY_RUN if allow_run else ""),
        log_level="ERROR",
    )
    runs = Runs(base)
    _add_reading(server, base)
    _add_looking(server, base)
    if allow_run:
        _add_running(server, base, runs)
    return server, runs


def _told(tool: Callable[P, T]) -> Callable[P, T]:
    """Tell the assistant what is wrong with a call; the SDK hides the text of every other exception."""

    @functools.wraps(tool)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return tool(*args, **kwargs)
        except TorchmedicError as error:
            raise ToolError(visible(str(error))) from None

    return call


def _add_reading(server: MCPServer[Any], base: Path) -> None:
    @server.tool()
    @_told
    def report(run: str = "", format: ReportFormat = "prompt", tokens: int = 1500) -> str:
        """Diagnoses of a run: cause, line, evidence, cures and what was tried.

        run: the run folder; empty for the newest one below .torchmedic.
        """
        return reading.report_text(reading.run_folder(run, base), format, max(200, min(tokens, 20_000)))

    @server.tool()
    @_told
    def explain(code: str = "") -> str:
        """What a code such as TM201 means, why it happens and how it is cured; without a code, the list of all."""
        return reading.explanation(code)

    @server.tool()
    @_told
    def source_context(run: str = "", incident: int = 0, lines: int = 8) -> str:
        """Source around each place that an incident names, read now; says if a line has changed since the run.

        incident: the place of the diagnosis in the report, from 0.
        """
        return reading.source_context(reading.run_folder(run, base), base, incident, lines)


def _add_looking(server: MCPServer[Any], base: Path) -> None:
    @server.tool()
    @_told
    def repro(run: str = "") -> str:
        """A standalone script of the failing operation with its inputs, and whether it fails in the same way."""
        return running.repro_text(reading.run_folder(run, base), base)

    @server.tool()
    @_told
    def attach(pid: int, seconds: float = 2.0) -> dict[str, Any]:
        """Why a running process makes no progress. It is not stopped or changed."""
        words = ["attach", "--format", "json", "--seconds", f"{max(0.5, min(seconds, 60.0)):g}", str(pid)]
        return running.verb_json(words, base)

    @server.tool()
    @_told
    def preflight(script: str = "") -> dict[str, Any]:
        """Checks of the host, the GPUs and a script (which is read, not run) for causes of hangs and freezes."""
        return running.verb_json(["preflight", "--format", "json", *([script] if script else [])], base)


def _add_running(server: MCPServer[Any], base: Path, runs: Runs) -> None:
    @server.tool()
    @_told
    def run(
        script: str, arguments: list[str] | None = None, hold_seconds: float = 900.0, wait_seconds: float = 300.0
    ) -> dict[str, Any]:
        """Run a training script under torchmedic. Returns when it has ended, or when its failing step is held.

        A held step waits hold_seconds for try_cure. The state "running" means that wait_seconds were not enough.
        """
        return runs.start(script, arguments or [], max(0.0, hold_seconds), max(1.0, min(wait_seconds, 3600.0)))

    @server.tool()
    @_told
    def run_state(run: str, wait_seconds: float = 60.0) -> dict[str, Any]:
        """How a run that was started here stands, after waiting for its end or its failing step."""
        return runs.state(reading.run_folder(run, base), max(0.0, min(wait_seconds, 3600.0)))

    @server.tool()
    @_told
    def try_cure(run: str, patch: str) -> dict[str, Any]:
        """Run the failing step once more with your patch, in the process that holds it. No file is changed.

        patch: a unified diff. It passes if the step ends with a finite loss and finite gradients. Code that ran before
        the step, such as the construction of the model, is not run again; a patch of it is refused.
        """
        return running.try_cure(reading.run_folder(run, base), patch)

    @server.tool()
    @_told
    def stop(run: str) -> str:
        """End a script that was started here."""
        runs.stop(reading.run_folder(run, base))
        return "stopped"
