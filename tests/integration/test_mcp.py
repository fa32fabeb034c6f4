"""The MCP server, asked by the client of the official SDK over stdio."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("mcp") is None:
    pytest.skip("mcp is not installed", allow_module_level=True)

FAILING = """
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x / x.std(-1, keepdim=True)

torch.manual_seed(0)
model = nn.Sequential(Norm(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(4, 8)
    if step == 5:
        x[2] = 0.0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HEAD = "--- a/train.py\n+++ b/train.py\n"
# The line numbers are wrong, as those of an assistant often are.
GOOD = f"""{HEAD}@@ -1,3 +1,4 @@
     def forward(self, x):
-        return x / x.std(-1, keepdim=True)
+        spread = x.std(-1, keepdim=True)
+        return x / spread.clamp(min=1e-5)
"""
USELESS = f"""{HEAD}@@ -7 +7 @@
-        return x / x.std(-1, keepdim=True)
+        return x / x.abs().sum(-1, keepdim=True)
"""
BEFORE_THE_STEP = f"""{HEAD}@@ -10 +10 @@
-model = nn.Sequential(Norm(), nn.Linear(8, 1))
+model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))
"""
NO_PATCH = "please add an epsilon"

Call = Callable[..., Awaitable[Any]]


def session(folder: Path, options: list[str], conversation: Callable[[list[str], Call], Awaitable[None]]) -> None:
    """Hold a conversation with a server in a folder: the names of its tools, and a function that calls one."""

    from mcp import ClientSession, StdioServerParameters, stdio_client  # takes every worker a second to import

    async def talk() -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHMEDIC_")}
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "torchmedic", "mcp", *options], cwd=folder, env=environment
        )
        async with stdio_client(server) as (reader, writer), ClientSession(reader, writer) as client:
            await client.initialize()

            async def call(name: str, **arguments: Any) -> Any:
                answer = await client.call_tool(name, arguments)
                text = "".join(part.text for part in answer.content)
                if answer.is_error:
                    raise RuntimeError(text)
                found = answer.structured_content
                return found["result"] if set(found) == {"result"} else found

            listed = await client.list_tools()
            await conversation([tool.name for tool in listed.tools], call)

    asyncio.run(talk())


def test_a_server_that_may_not_run_anything_has_no_tool_for_it(tmp_path: Path) -> None:
    async def talk(tools: list[str], call: Call) -> None:
        assert tools == ["report", "explain", "source_context", "repro", "attach", "preflight"]
        assert "division-by-zero" in await call("explain", code="TM201")
        assert len((await call("explain")).splitlines()) > 100
        with pytest.raises(RuntimeError, match="there is no run below"):
            await call("report")

    session(tmp_path, [], talk)


def test_an_assistant_runs_a_script_and_tries_its_own_patches_on_the_failing_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)

    async def talk(tools: list[str], call: Call) -> None:
        assert {"run", "run_state", "try_cure", "stop"} <= set(tools)
        found = await call("run", script="train.py", hold_seconds=120)
        assert found["state"] == "held", found
        assert "TM201" in found["report"]
        assert "train.py:7" in found["report"]
        run = found["run"]
        assert ">     7         return x / x.std(-1, keepdim=True)" in await call("source_context", run=run)
        useless = await call("try_cure", run=run, patch=USELESS)
        assert (useless["tried"], useless["passed"]) == (True, False)
        assert "nan" in useless["result"]
        good = await call("try_cure", run=run, patch=GOOD)
        assert (good["tried"], good["passed"]) == (True, True), good
        assert "all gradients finite" in good["result"]
        assert (
            "changes nothing that the failing step runs"
            in (await call("try_cure", run=run, patch=BEFORE_THE_STEP))["result"]
        )
        assert (await call("try_cure", run=run, patch=NO_PATCH))["tried"] is False
        assert "TM201" in await call("report")  # the newest run
        assert await call("stop", run=run) == "stopped"
        assert (await call("run_state", run=run))["state"] == "ended"
        with pytest.raises(RuntimeError, match="holds no failing step now"):
            await call("try_cure", run=run, patch=GOOD)
        assert (tmp_path / "train.py").read_text() == FAILING

    session(tmp_path, ["--allow-run"], talk)


@pytest.mark.slow
def test_repro_attach_and_preflight_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)

    async def talk(tools: list[str], call: Call) -> None:
        found = await call("run", script="train.py", hold_seconds=0)
        assert (found["state"], found["exit_status"]) == ("ended", 0)
        script = await call("repro", run=found["run"])
        assert script.startswith("# checked: it fails in the same way")
        assert "torch.div" in script
        checked = await call("preflight", script="train.py")
        assert json.dumps(checked)
        with pytest.raises(RuntimeError, match=str(1 << 30)):
            await call("attach", pid=1 << 30)
        assert "diagnoses" in await call("attach", pid=os.getpid(), seconds=0.5)

    session(tmp_path, ["--allow-run"], talk)
