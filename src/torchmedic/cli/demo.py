"""Run a bundled training script that fails, and diagnose the failure."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmedic.errors import ExitStatus

NAME = "demo"


def prepare(parser: argparse.ArgumentParser) -> None:
    del parser


def execute(args: argparse.Namespace) -> int:
    import sys

    import torchmedic
    from torchmedic.settings import load
    from torchmedic.supervise.child import launch
    from torchmedic.supervise.run import run

    del args
    script = Path(torchmedic.__file__).parent / "demos" / "constant_row.py"
    sys.stderr.write(f"$ torchmedic run {script}\n")
    settings = load({"fail_on": "error"}, folder=Path.cwd())
    status = run(launch.python_command([str(script)]), settings, name=script.name, hide=True)
    # NaN does not end a script. The demo succeeds if the origin of the NaN was found.
    return ExitStatus.OK if status == ExitStatus.FINDINGS else ExitStatus.FAILED
