"""Check the host, the GPUs and the script for causes of hangs and freezes, before a run.

examples:
  torchmedic preflight
  torchmedic preflight train.py
  torchmedic preflight --format json train.py

The script is read, not run. `fail` means that the run will certainly break, `warn` that it may. The exit status is 1 if
a check fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmedic.errors import ExitStatus
from torchmedic.records.plain_text import visible_json

NAME = "preflight"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs="?", type=Path, metavar="script.py", help="the training script to check")
    parser.add_argument("-f", "--format", choices=("table", "json"), default="table", help="how the result is shown")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.supervise.preflight import finding as findings
    from torchmedic.supervise.preflight.examine import examine

    found = examine(args.script)
    if args.format == "json":
        sys.stdout.write(visible_json(findings.as_json(found)))
    else:
        findings.show(found)
    return ExitStatus.FAILED if any(finding.status == "fail" for finding in found) else ExitStatus.OK
