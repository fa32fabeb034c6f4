"""A process that has imported torch already, and forks for every script: half a second a run instead of five.

The whole command line runs in the fork, supervisor and all; only the start of a new interpreter is replaced by another
fork, in which the agent is installed as `inject/sitecustomize.py` would have done it. What is about starting processes
(tests/contract) does not use this.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn


class Zygote:
    """The client's side: one zygote per test process, started at its first use."""

    _process: subprocess.Popen[str] | None = None

    @classmethod
    def run(
        cls, folder: Path, arguments: list[str], environment: dict[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Run `torchmedic <arguments>` in a folder; status, stdout and stderr."""
        process = cls._process
        if process is None or process.poll() is not None:
            process = cls._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            atexit.register(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        out, err = folder / ".stdout", folder / ".stderr"
        request = {
            "folder": str(folder),
            "arguments": arguments,
            "environment": environment,
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return status, out.read_text(errors="replace"), err.read_text(errors="replace")


def serve() -> None:
    import torch
    import torch._dynamo  # the first optimizer of every script would import it

    for module in ("cli", "supervise.run", "report.terminal", "observe.agent", "diagnose.in_process"):
        importlib.import_module(f"torchmedic.{module}")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _supervise(request)
        status = os.waitpid(pid, 0)[1]
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _supervise(request: dict[str, Any]) -> NoReturn:
    from torchmedic import cli
    from torchmedic.supervise import launch

    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    real_start = launch.start

    def start(command: Any, env: dict[str, str], mask: Any) -> Any:
        if len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py"):
            return _Forked(command[1:], env, mask)
        return real_start(command, env, mask)

    launch.start = start
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(int(request["timeout"]))
    status = cli.main(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Forked:
    """The part of Popen that the supervisor uses."""

    def __init__(self, command: list[str], env: dict[str, str], mask: Any) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask if mask is not None else ())
            _become(command, env)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _become(command: list[str], env: dict[str, str]) -> NoReturn:
    """Be the script, as the interpreter would have made it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    run_dir = env["TORCHMEDIC_RUN_DIR"]
    for name in [name for name in env if name.startswith("TORCHMEDIC_") and name != "TORCHMEDIC_INJECT_FAULT"]:
        env.pop(name)
    os.environ.clear()
    os.environ.update(env)
    script = os.path.abspath(command[0])
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(script)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    from torchmedic.observe import agent

    agent.install(run_dir)
    status = 0
    try:
        with open(script, encoding="utf-8") as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        status = 1
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
