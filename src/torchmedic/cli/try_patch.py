"""Run the failing step of a run once more with a patch, while `torchmedic run --hold` keeps it alive.

examples:
  torchmedic run --hold 600 --output failed train.py
  torchmedic try failed fix.diff
  torchmedic try --release failed

The patch is a unified diff. Nothing on the disk is changed. The exit status is 0 if the step ends with a finite loss
and finite gradients. `--release` lets the script go on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmedic.errors import ExitStatus, TorchmedicError, UsageError

NAME = "try"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("patch", metavar="PATCH", nargs="?", help="a file with a unified diff, or - for stdin")
    parser.add_argument("--release", action="store_true", help="let the script go on")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="patience in seconds (default: 120)")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.report.console import stdout_console
    from torchmedic.runfolder import held
    from torchmedic.runfolder.confidential import work_of

    run = work_of(args.run)
    if (args.patch is None) != args.release:
        raise UsageError("one of PATCH and --release is needed")
    steps = held.held_steps(run)
    if not steps:
        raise TorchmedicError(
            f"{args.run} holds no step now: a run does under `torchmedic run --hold SECONDS`, from its diagnosis on"
        )
    if args.release:
        held.release(run)
        return ExitStatus.OK
    result = held.try_patch(run, steps[0], _read(args.patch), args.seconds)
    console = stdout_console()
    if result.refused:
        console.print(f"not tried: {result.refused}", soft_wrap=True)
        return ExitStatus.FAILED
    console.print(f"{'passed' if result.passed else 'failed'}: {result.result}", soft_wrap=True)
    return ExitStatus.OK if result.passed else ExitStatus.FAILED


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
