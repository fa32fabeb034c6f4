"""Run a bundled training script that fails, and diagnose it."""

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
    from torchmedic.supervise import launch
    from torchmedic.supervise.run import run

    del args
    script = Path(torchmedic.__file__).parent / "demos" / "digits.py"
    sys.stderr.write(f"$ torchmedic run {script}\n")
    status = run(launch.python_command([str(script)]), load({}, folder=Path.cwd()), name=script.name, hide=True)
    # The demo has done its job when the script has failed and the failure was explained.
    return ExitStatus.OK if status == 1 else ExitStatus.FAILED
