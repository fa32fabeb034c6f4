"""A process that has imported torch and torchmedic already, and forks for every script: a tenth of the time of a start.

The whole command line runs in the fork, supervisor and all; only the start of a new interpreter is replaced by another
fork, in which the agent is installed as `inject/sitecustomize.py` would have done it. What is about starting processes
(tests/contract) does not use this.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_LONGEST_REQUEST = 1 << 20
_MAX_SECONDS_ALONE = 60  # before the first worker connects
_NOT_LOADED = ("torchmedic.inject", "torchmedic.demos", "torchmedic.integrations.", "torchmedic.assist")
_LEFT = ("TORCHMEDIC_INJECT_FAULT", "TORCHMEDIC_CGROUP_ROOT")  # what a script is started with for a test


class Zygote:
    """The client's side: one zygote for all workers of a test run, started at its first use; any number of scripts."""

    _pid: int | None = None  # in the worker that was first to need it
    _control: socket.socket | None = None
    _starting = threading.Lock()

    @classmethod
    def run(
        cls, folder: Path, arguments: list[str], environment: dict[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Run `torchmedic <arguments>` in a folder; status, stdout and stderr."""
        status = cls.start(folder, arguments, environment, timeout).wait()
        return status, *cls.output(folder)

    @classmethod
    def start(
        cls, folder: Path, arguments: list[str], environment: dict[str, str], timeout: float, *, name: str = ""
    ) -> Started:
        """The same, without waiting for its end. `name` tells several runs in one folder apart."""
        out, err = str(folder / f".stdout{name}"), str(folder / f".stderr{name}")
        return cls._ask(folder, {"run": arguments, "out": out, "err": err}, environment, timeout)

    @classmethod
    def output(cls, folder: Path, name: str = "") -> tuple[str, str]:
        """What a run in a folder has written so far: stdout and stderr."""
        out, err = (folder / f"{stream}{name}" for stream in (".stdout", ".stderr"))
        return out.read_text(errors="replace"), err.read_text(errors="replace")

    @classmethod
    def watch(
        cls, folder: Path, script: str, run: Path, environment: dict[str, str], timeout: float
    ) -> tuple[int, str]:
        """Run a script with an agent that writes to a run folder, and with nobody above it; status and all it wrote."""
        out = folder / ".output"
        environment = {**environment, "TORCHMEDIC_RUN_DIR": str(run)}
        status = cls._ask(folder, {"watch": script, "out": str(out), "err": str(out)}, environment, timeout).wait()
        return status, out.read_text(errors="replace")

    @classmethod
    def plain(cls, folder: Path, script: str, environment: dict[str, str], timeout: float) -> tuple[int, str, str]:
        """Run a script as Python would, without torchmedic; status, stdout and stderr."""
        out, err = str(folder / ".stdout"), str(folder / ".stderr")
        work = {"plain": script, "out": out, "err": err}
        status = cls._ask(folder, work, environment, timeout).wait()
        return status, *cls.output(folder)

    @classmethod
    def _ask(cls, folder: Path, work: dict[str, Any], environment: dict[str, str], timeout: float) -> Started:
        with cls._starting:
            if cls._control is None or _is_closed(cls._control):
                cls._control = cls._connect(environment)
        request = {**work, "folder": str(folder), "environment": environment, "timeout": timeout}
        answer, theirs = os.pipe()
        try:
            socket.send_fds(cls._control, [json.dumps(request).encode()], [theirs])
        finally:
            os.close(theirs)
        return Started(answer)

    @classmethod
    def _connect(cls, environment: dict[str, str]) -> socket.socket:
        """A connection, at whose end the zygote kills what it has forked for it; after the last one it ends."""
        address = f"\0torchmedic-zygote-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.suppress(OSError):
                listener.bind(address)  # refused where another worker has started it
                listener.listen(64)
                stdin = (os.POSIX_SPAWN_DUP2, listener.fileno(), 0)
                command = [sys.executable, __file__]
                cls._pid = os.posix_spawn(sys.executable, command, environment, file_actions=[stdin])
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                control.connect(address)
            except ConnectionRefusedError:  # another worker is about to listen
                control.close()
                time.sleep(0.05)
            else:
                atexit.register(control.close)
                return control


def _is_closed(control: socket.socket) -> bool:
    return bool(select.select([control], [], [], 0)[0])  # the zygote never writes to it


class Started:
    """A run under way: the number of its first process, then what that ended with."""

    def __init__(self, answer: int) -> None:
        with open(answer, "rb", buffering=0, closefd=False) as lines:
            first = lines.readline()
        assert first, "the zygote has died; what it said is on stderr"
        self.pid = int(first)
        self._answer = answer

    def is_over(self) -> bool:
        return bool(select.select([self._answer], [], [], 0)[0])

    def wait(self) -> int:
        """The status that it ended with; to be asked for once."""
        with open(self._answer, "rb") as status:
            return int(status.read())


def serve() -> None:
    _import_everything()
    listener = socket.socket(fileno=0)
    controls: dict[int, socket.socket] = {}  # by descriptor, one for each worker
    runs: dict[int, _Run] = {}  # by the descriptor that tells of the end of a process
    while True:
        ready, _, _ = select.select([0, *controls, *runs], [], [], None if controls else _MAX_SECONDS_ALONE)
        if not ready:
            os._exit(1)
        for ended in [each for each in ready if each in runs]:
            pid, answer, _ = runs.pop(ended)
            _tell(answer, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os.close(answer)
            os.close(ended)
        if 0 in ready:
            accepted = listener.accept()[0]
            controls[accepted.fileno()] = accepted
        for worker in [each for each in ready if each in controls]:
            message, given, _, _ = socket.recv_fds(controls[worker], _LONGEST_REQUEST, 1)
            if message:
                runs.update(
                    _forked(message, given[0], worker, [*controls, *runs, *(run.answer for run in runs.values())])
                )
                continue
            controls.pop(worker).close()
            for run in runs.values():
                if run.worker == worker:
                    with contextlib.suppress(OSError):
                        os.killpg(run.pid, signal.SIGKILL)
            if not controls:
                os._exit(0)


def _import_everything() -> None:
    """Read and compile once what every script needs. A walk over the variables of a stack meets none of it."""
    gc.disable()  # to collect during imports takes a sixth of their time
    import msgspec
    import numpy
    import torch

    import torchmedic
    from torchmedic import records
    from torchmedic.observe import budget
    from torchmedic.report.html import page
    from torchmedic.source.user_code import is_user_file, verdicts

    for module in ("torch._dynamo", "torch.profiler._cupti_monitor"):  # the first optimizer, and the first of its steps
        with contextlib.suppress(ImportError):  # would import them in every script; not all versions have both
            importlib.import_module(module)
    for found in pkgutil.walk_packages(torchmedic.__path__, "torchmedic."):
        if not found.name.startswith((*_NOT_LOADED, "torchmedic.__main__")):
            importlib.import_module(found.name)
    budget.FULL_SECONDS.update(leaks=10.0, norms=10.0)  # however slow the machine is
    templates = page._environment()
    for name in templates.list_templates(extensions=["j2"]):
        templates.get_template(name)  # compiled once, and not in every run that has a diagnosis
    for record in vars(records).values():
        if isinstance(record, type) and issubclass(record, msgspec.Struct):
            msgspec.json.Decoder(record)  # reads the annotations of its class once
    for module in list(sys.modules.values()):
        if isinstance(file := getattr(module, "__file__", None), str):
            is_user_file(file)  # remembered, as is the verdict in a user's process
    verdicts[__file__] = False  # the frames below a script are not the user's
    torch.set_num_threads(1)
    # All scripts begin with the state of this process, and a script that sets no seed has the same numbers in each run.
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its 170 operator libraries apart again, in every process that ends
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page of this
    gc.enable()


class _Run(NamedTuple):
    pid: int
    answer: int  # where its end is told
    worker: int  # the connection that asked for it


def _forked(message: bytes, answer: int, worker: int, others: list[int]) -> dict[int, _Run]:
    """Start a run; `others` are the descriptors that it must not inherit."""
    pid = os.fork()
    if pid == 0:
        for descriptor in (*others, answer):
            os.close(descriptor)
        _serve_one(json.loads(message))
    _tell(answer, f"{pid}\n")
    return {os.pidfd_open(pid): _Run(pid, answer, worker)}


def _tell(answer: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the worker has died; the zygote serves the others
        os.write(answer, text.encode())


def _serve_one(request: dict[str, Any]) -> NoReturn:
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(int(request["timeout"]))
    if "plain" in request:
        _become([request["plain"]], dict(os.environ), watched=False)
    if "watch" in request:
        _become([request["watch"]], dict(os.environ))
    _supervise(request["run"])


def _supervise(arguments: list[str]) -> NoReturn:
    from torchmedic import cli
    from torchmedic.supervise.child import launch

    real_start = launch.start

    def start(command: Any, env: dict[str, str], mask: Any) -> Any:
        if len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py"):
            return _Forked(command[1:], env, mask)
        return real_start(command, env, mask)

    launch.start = start
    status = cli.main(arguments)
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


def _become(command: list[str], env: dict[str, str], *, watched: bool = True) -> NoReturn:
    """Be the script, as the interpreter would have made it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    run_dir = env.get("TORCHMEDIC_RUN_DIR", "")
    if watched:
        env = {name: value for name, value in env.items() if not name.startswith("TORCHMEDIC_") or name in _LEFT}
    os.environ.clear()
    os.environ.update(env)
    script = os.path.abspath(command[0])
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(script)
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = builtins  # as in a script, and not a dictionary as in other modules
    sys.modules["__main__"] = main
    if watched:
        from torchmedic.integrations.telling import install

        install(run_dir)
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
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # torch's handler of dead workers, for one, raises wherever it is called
            sys.stderr.write("Error in sys.excepthook:\n" + traceback.format_exc())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
