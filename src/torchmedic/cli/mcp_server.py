"""Serve assistants: reports, explanations, source lines and more as tools of the Model Context Protocol, over stdio.

examples:
  torchmedic mcp
  torchmedic mcp --allow-run

Needs `pip install 'torchmedic[mcp]'`. With --allow-run the assistant may also run scripts of this folder, and try
patches on a failing step. See docs/assistants.md for the settings of assistants.
"""

from __future__ import annotations

import argparse

from torchmedic.errors import ExitStatus, UsageError
from torchmedic.settings import working_folder

NAME = "mcp"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-run", action="store_true", help="let the assistant run scripts and try patches")


def execute(args: argparse.Namespace) -> int:
    try:
        from torchmedic.assist import server
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("mcp"):
            raise
        raise UsageError("the package mcp is missing: pip install 'torchmedic[mcp]'") from None
    made, runs = server.build(working_folder().absolute(), allow_run=args.allow_run)
    try:
        made.run("stdio")
    finally:
        runs.close()
    return ExitStatus.OK
