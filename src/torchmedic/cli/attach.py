"""Explain why a running process makes no progress, without touching it.

examples:
  torchmedic attach 12345
  torchmedic attach --seconds 30 12345
  torchmedic attach --format json 12345 > verdict.json

Reads the process and its descendants (ranks, DataLoader workers) through /proc, and through py-spy if it is installed
(`pip install 'torchmedic[py-spy]'`). Nothing is stopped, signalled or changed. The exit status is 0 if no hang was
found, 1 if one was.
"""

from __future__ import annotations

import argparse
import sys

from torchmedic.errors import ExitStatus

NAME = "attach"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", metavar="PID", type=_pid, help="the process: a script, a launcher or the shell above it")
    parser.add_argument(
        "-f",
        "--format",
        choices=("full", "concise", "json"),
        default="full",
        help="format of the diagnoses on stderr; json is printed to stdout",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=2.0, metavar="S", help="length of the examination in seconds (default: 2)"
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="also read C frames, for which py-spy stops each process for a fraction of a second",
    )


def execute(args: argparse.Namespace) -> int:
    from torchmedic.records import encode
    from torchmedic.report import terminal
    from torchmedic.report.console import stderr_console
    from torchmedic.supervise.attach.attach import attach

    answer = attach(args.pid, seconds=args.seconds, native=args.native)
    if args.format == "json":
        sys.stdout.write(encode(answer.report).decode())
        return ExitStatus.FAILED if answer.hung else ExitStatus.OK
    console = stderr_console()
    terminal.print_all(console, answer.diagnoses, args.format, None)
    if not answer.diagnoses:
        for line in answer.lines:
            console.print(line, soft_wrap=True)
    for note in answer.notes if args.format == "full" else ():
        console.print(note, soft_wrap=True)
    return ExitStatus.FAILED if answer.hung else ExitStatus.OK


def _pid(word: str) -> int:
    if not word.isdecimal() or not 0 < int(word) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{word!r} is not a process id")
    return int(word)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 600:
        raise argparse.ArgumentTypeError(f"{word!r} is not between 0.5 and 600 seconds")
    return seconds
