"""Run a training script under supervision, and explain the failure if it fails.

examples:
  torchmedic run train.py --epochs 3
  torchmedic run -m package.train --epochs 3
  torchmedic run -- torchrun --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m torchmedic run train.py

Options before the script are for torchmedic, everything after it is for the script. The exit status is the script's
own, or 128 + N if signal N ended it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from torchmedic.errors import UsageError
from torchmedic.records.plain_text import visible
from torchmedic.settings import Format, load, working_folder

NAME = "run"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.usage = "torchmedic run [options] (script.py | -m module | -- command) [args]"
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="the run folder, new or empty (default: .torchmedic/<time>-<script>)"
    )
    parser.add_argument(
        "-f", "--format", choices=get_args(Format), help="format of the diagnoses on stderr (default: full)"
    )
    parser.add_argument(
        "--fail-on",
        "--fail_on",
        choices=("error", "warning", "never"),
        help="exit with status 3 on such a finding even if the script succeeds (default: never)",
    )
    parser.add_argument(
        "--confidential", action="store_true", default=None, help="write no source, values, names or paths"
    )
    parser.add_argument(
        "--no-checkup",
        "--no_checkup",
        dest="checkup",
        action="store_false",
        default=None,
        help="do not check for mistakes that raise no error (TM6xx)",
    )
    parser.add_argument(
        "--stall-after",
        "--stall_after",
        metavar="SECONDS",
        help="examine the run after this many seconds without progress; 0 disables (default: learned, at least 30)",
    )
    parser.add_argument(
        "--on-stall",
        "--on_stall",
        choices=("report", "kill", "checkpoint"),
        help="what to do with a hung run after it has been reported (default: report, which leaves it running)",
    )
    parser.add_argument(
        "--hold",
        metavar="SECONDS",
        help="keep a failing step alive for this long, so that `torchmedic try` can run it with a patch (default: 0)",
    )
    parser.add_argument(
        "--recover",
        choices=("off", "safe", "all"),
        help="go on after an out-of-memory, with the same results (default: off; all: also repeat backward hooks)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as with python -m")
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
    names = ("format", "fail_on", "confidential", "checkup", "stall_after", "on_stall", "hold", "recover")
    flags = {name: getattr(args, name) for name in names}
    settings = load(flags, folder=working_folder())
    output: str | None = args.output
    if is_command:
        name = command[-1] if len(command) == 1 else _script_of(command)
    elif args.module:
        name, command = command[0], launch.python_command(["-m", *command])
    else:
        name, command = _checked_script(command[0]), launch.python_command(command)
    flag = launch.blinding_flag(command)
    if flag is not None:
        shown = visible(flag)
        sys.stderr.write(f"torchmedic: the steps are not watched: with {shown}, Python does not load torchmedic\n")
    return run(command, settings, name=name, hide=not is_command, output=output)


def _checked_script(word: str) -> str:
    """The name of a script. Raises UsageError if it is none."""
    script = Path(word)
    if not script.exists():
        raise UsageError(f"cannot find the script {word}")
    if not script.is_file() and not (script / "__main__.py").is_file():
        raise UsageError(f"cannot run {word}: it is not a script")
    return script.name


def _script_of(command: list[str]) -> str:
    """The word of a command that names the run: its first Python or shell script, else the command."""
    return next((word for word in command if word.endswith((".py", ".sh"))), command[0])
