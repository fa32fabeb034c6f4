"""Run a training script, watch it, and say what went wrong if it fails.

examples:
  torchmedic run train.py --epochs 3
  torchmedic run -m package.train --epochs 3
  torchmedic run -- torchrun --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m torchmedic run train.py

Options before the script are torchmedic's, everything from the script on is the script's. The exit status is the
script's own, 128 + N for a signal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmedic.errors import UsageError
from torchmedic.settings import load

NAME = "run"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="DIR", help="the run folder (default: .torchmedic/<time>-<script>)")
    parser.add_argument(
        "-f", "--format", choices=("full", "concise", "json"), help="how a diagnosis is shown on stderr"
    )
    parser.add_argument(
        "--fail-on",
        "--fail_on",
        choices=("error", "warning", "never"),
        help="exit with 3 on such a finding although the script ended well (default: never)",
    )
    parser.add_argument(
        "--confidential", action="store_true", default=None, help="no source and no values in what is written"
    )
    parser.add_argument(
        "--no-checkup",
        "--no_checkup",
        dest="checkup",
        action="store_false",
        default=None,
        help="do not look for mistakes that raise nothing (TM6xx)",
    )
    parser.add_argument(
        "--stall-after",
        "--stall_after",
        metavar="SECONDS",
        help="examine a run that has not got on for so long; 0 is never (default: learned from the run, 30 at least)",
    )
    parser.add_argument(
        "--on-stall",
        "--on_stall",
        choices=("report", "kill", "checkpoint"),
        help="what to do with a run that hangs, once it has been reported (default: report, and leave it alone)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module, as with python -m")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script.py ...", help="the script and its arguments"
    )


def execute(args: argparse.Namespace) -> int:
    from torchmedic.supervise.child import launch
    from torchmedic.supervise.run import run

    command: list[str] = args.command
    is_command = bool(command) and command[0] == "--"
    if is_command:
        command = command[1:]
    if not command:
        raise UsageError("nothing to run (torchmedic run script.py, run -m module, or run -- command)")
    names = ("output", "format", "fail_on", "confidential", "checkup", "stall_after", "on_stall")
    flags = {name: getattr(args, name) for name in names}
    settings = load(flags, folder=Path.cwd())
    if is_command:
        return run(command, settings, name=command[-1] if len(command) == 1 else _script_of(command), hide=False)
    if args.module:
        return run(launch.python_command(["-m", *command]), settings, name=command[0], hide=True)
    script = Path(command[0])
    if not script.exists():
        raise UsageError(f"cannot find the script {command[0]}")
    if not script.is_file() and not (script / "__main__.py").is_file():
        raise UsageError(f"cannot run {command[0]}: it is not a script")
    return run(launch.python_command(command), settings, name=script.name, hide=True)


def _script_of(command: list[str]) -> str:
    """The word of a command that names the run best: its first Python or shell script."""
    return next((word for word in command if word.endswith((".py", ".sh"))), command[0])
