"""Show the diagnoses of a run.

examples:
  torchmedic report .torchmedic/2026-11-15T010203-train
  torchmedic report --format json .torchmedic/2026-11-15T010203-train
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmedic.errors import ExitStatus

NAME = "report"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or its report.json")
    parser.add_argument("-f", "--format", choices=("full", "concise", "json"), default="full")
    parser.add_argument("--notes", action="store_true", help="also show notes: advice about harmless findings")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.records import encode
    from torchmedic.report import terminal
    from torchmedic.report.console import stdout_console
    from torchmedic.supervise.abandoned import read_report

    report = read_report(args.run)
    folder = args.run if args.run.is_dir() else args.run.parent
    if args.format == "json":
        sys.stdout.write(encode(report).decode())
        return ExitStatus.OK
    console = stdout_console()
    shown = [diagnosis for diagnosis in report.diagnoses if args.notes or diagnosis.severity != "note"]
    terminal.print_all(console, shown, args.format, folder)
    if not shown:
        console.print(f"nothing was found: {report.outcome.steps} steps, exit status {report.outcome.exit_status}")
    return ExitStatus.OK
