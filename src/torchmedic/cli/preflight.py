"""Check before a run what would hang or freeze it: the host, the GPUs, the script.

examples:
  torchmedic preflight
  torchmedic preflight train.py
  torchmedic preflight --format json train.py

The script is read, not run. `fail` is what will certainly break, `warn` what may, with the number that it is based on.
The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmedic.errors import ExitStatus

NAME = "preflight"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs="?", type=Path, metavar="script.py", help="the training script to look at")
    parser.add_argument("-f", "--format", choices=("table", "json"), default="table")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.supervise.preflight import table
    from torchmedic.supervise.preflight.examine import examine

    found = examine(args.script)
    if args.format == "json":
        sys.stdout.write(table.as_json(found))
    else:
        table.show(found)
    return ExitStatus.FAILED if any(finding.status == "fail" for finding in found) else ExitStatus.OK
