"""Scripts watched by an agent in forked children of one process that has imported torch: a second each, not five.

What only `torchmedic run` itself can show is tested with `running.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path

import msgspec

from torchmedic.records import Diagnosis, Fault
from torchmedic.rundir import process_folders, read_diagnoses, read_faults


class Watched(msgspec.Struct):
    """A script that is over."""

    status: int
    diagnoses: list[Diagnosis]
    faults: list[Fault]
    output: str


class ForkServer:
    """Has torch imported, and nothing else done, so that a fork of it is a fresh Python with torch."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, folder: Path) -> Watched:
        """Run `train.py` of a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        status = int(json.loads(self._process.stdout.readline())["status"])
        parts = process_folders(folder / "run")
        return Watched(
            status,
            [found for part in parts for found in read_diagnoses(part).values()],
            [fault for part in parts for fault in read_faults(part)],
            (folder / "output").read_text(),
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _serve() -> None:
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer of every script would import it

    for module in ("observe.agent", "diagnose.in_process"):
        importlib.import_module(f"torchmedic.{module}")
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(Path(line.strip()))
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(folder: Path) -> None:
    """The script of a folder, in place of this process."""
    status = 9
    try:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.argv = ["train.py"]
        (folder / "run").mkdir()
        status = _watched(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watched(folder: Path) -> int:
    from torchmedic.observe import agent

    agent.install(str(folder / "run"))
    main = types.ModuleType("__main__")
    main.__file__ = str(folder / "train.py")
    sys.modules["__main__"] = main
    code = compile((folder / "train.py").read_text(), main.__file__, "exec", dont_inherit=True)
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    except BaseException as error:
        status = 1
        shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None)
        sys.excepthook(type(shown), shown, shown.__traceback__)
    agent._on_exit()
    return status


if __name__ == "__main__":
    _serve()
