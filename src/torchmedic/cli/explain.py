"""Explain a diagnosis, or list all diagnoses by family.

examples:
  torchmedic explain TM151
  torchmedic explain
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap

from torchmedic.errors import ExitStatus, UsageError

NAME = "explain"
_SUMMARY_INDENT = 42  # columns before the summaries of a list
_NARROW_INDENT = 10
_MAX_WIDTH = 120  # columns of a text that is still read easily


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
            print(_wrapped(f"  {entry.code}  {entry.name:<32} {entry.summary}", _SUMMARY_INDENT))
        return ExitStatus.OK
    try:
        text = catalogue.explain(args.code)
    except LookupError as error:
        raise UsageError(f"{error} (`torchmedic explain` lists them all)") from None
    print("\n\n".join(map(_wrapped, catalogue.paragraphs(text))) if _is_shown() else text)
    return ExitStatus.OK


def _is_shown() -> bool:
    """Whether somebody reads the output on a terminal. Elsewhere a line for each code can be searched."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def _wrapped(text: str, indent: int = 0) -> str:
    """Text for the width of the terminal."""
    if "\n" in text or not _is_shown():
        return text
    width = min(shutil.get_terminal_size((80, 24)).columns, _MAX_WIDTH)
    indent = indent if indent <= width // 2 + 2 else _NARROW_INDENT
    return textwrap.fill(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
