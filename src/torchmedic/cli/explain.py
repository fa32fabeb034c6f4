"""Explain a diagnosis, or list all diagnoses by family.

examples:
  torchmedic explain TM151
  torchmedic explain
"""

from __future__ import annotations

import argparse

from torchmedic.errors import ExitStatus, UsageError

NAME = "explain"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code such as TM151, or a name")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.diagnose import catalogue

    if args.code is None:
        family = ""
        for entry in catalogue.entries():
            if entry.family != family:
                print(*([""] if family else []), f"TM{entry.code[2]}xx: {entry.family}", sep="\n")
                family = entry.family
            print(f"  {entry.code}  {entry.name:<32} {entry.summary}")
        return ExitStatus.OK
    try:
        print(catalogue.explain(args.code))
    except LookupError as error:
        raise UsageError(f"{error} (`torchmedic explain` lists them all)") from None
    return ExitStatus.OK
