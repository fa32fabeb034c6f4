"""Predict the GPU memory of a training script without a GPU, and find the fastest settings that fit.

examples:
  torchmedic fit train.py --memory 24GiB
  torchmedic fit train.py --device-name H200 -- --batch-size 64
  torchmedic fit train.py

The script runs on this machine, on tensors without memory, until every optimizer has stepped twice. What it prints is
not shown, and torch.save writes nothing; other effects of the script happen. The exit status is 0 if the step fits, and
1 if it does not or if the script cannot be followed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torchmedic.errors import ExitStatus, UsageError
from torchmedic.records.plain_text import visible, visible_json

NAME = "fit"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="script.py", help="the training script")
    parser.add_argument("--memory", metavar="SIZE", help="memory of the card, such as 24GiB")
    parser.add_argument(
        "--device-name", "--device_name", metavar="NAME", default="", help="a card from the table, such as H200"
    )
    parser.add_argument("-f", "--format", choices=("table", "json"), default="table", help="how the result is shown")
    parser.add_argument("--apply", action="store_true", help="show the fastest plan as a diff; nothing is written")
    parser.add_argument(
        "--no-plans", "--no_plans", dest="plans", action="store_false", help="predict the script as it is, and no more"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=120.0, help="time limit of one run (default: 120)"
    )
    parser.epilog = "Words after -- are arguments of the script."
    parser.set_defaults(arguments=())
    whole = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        """Cut off the arguments of the script: argparse would take them for its own."""
        words = list(args or ())
        at = words.index("--") if "--" in words else len(words)
        found, rest = whole(words[:at], namespace)
        found.arguments = tuple(words[at + 1 :])
        return found, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def execute(args: argparse.Namespace) -> int:
    from torchmedic.fit import cards, process
    from torchmedic.records.fit import Request
    from torchmedic.report import fit as show

    script: Path = args.script
    if not script.exists():
        raise UsageError(f"cannot find the script {script}")
    if not script.is_file():
        raise UsageError(f"cannot run {script}: it is not a script")
    if args.device_name:
        cards.find_card(args.device_name)
    request = Request(
        script=str(script),
        arguments=args.arguments,
        folder=os.getcwd(),
        memory=cards.parse_size(args.memory) if args.memory else None,
        card=args.device_name,
        plans=args.plans,
        seconds=args.timeout,
    )
    prediction = process.ask(request)
    if args.format == "json":
        sys.stdout.write(visible_json(show.as_json(prediction)))
    elif args.apply:
        sys.stdout.write(visible(show.diff(prediction)))
    else:
        show.table(prediction)
    return ExitStatus.OK if prediction.fits else ExitStatus.FAILED
