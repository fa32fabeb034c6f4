"""The command line: one verb per file."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn, Protocol

from torchmedic import __version__
from torchmedic.cli import attach, demo, explain, fit, mcp_server, preflight, report, repro, run, try_patch, watch
from torchmedic.errors import ExitStatus, TorchmedicError, UsageError
from torchmedic.records.plain_text import visible


class Command(Protocol):
    """A module that implements a verb. Its docstring is the help text."""

    NAME: str

    def prepare(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, args: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    run,
    watch,
    attach,
    fit,
    preflight,
    explain,
    report,
    repro,
    try_patch,
    mcp_server,
    demo,
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


class _Help(argparse.HelpFormatter):
    """Help that fits the terminal: paragraphs are broken anew, and indented lines, which are examples, stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [
            part if "\n  " in part else textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False)
            for part in text.split("\n\n")
        ]
        return "\n\n".join(parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`-f, --format NAME`: the value once, and no second spelling with underscores."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        return names if action.nargs == 0 else f"{names} {self._format_args(action, action.dest.upper())}"


class _NullStream(io.TextIOBase):
    """Discards everything that is written."""

    def write(self, text: str) -> int:
        return len(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Every expected error is one line on stderr."""
    # Python sets a closed stream (`>&-`) to None.
    sys.stdout = sys.stdout or _NullStream()
    sys.stderr = sys.stderr or _NullStream()
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("torchmedic", _as_escape)
        sys.stdout.reconfigure(errors="torchmedic")  # it may be ASCII
    try:
        args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        status: int = args.execute(args)
        sys.stdout.flush()
        return status
    except TorchmedicError as error:
        _complain(str(error))
        return error.exit_status
    except OSError as error:  # the output could not be written: a closed pipe, a full disk
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot write: {error.strerror or error}")
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return 130


def _as_escape(error: UnicodeError) -> tuple[str, int]:
    r"""Write a character that the output cannot show as `\uXXXX`, which is also an escape of JSON."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)), error.end


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"torchmedic: {visible(text)}\n")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchmedic",
        description="Run a PyTorch training script; when it fails, read the cause, the line and the evidence.",
        epilog="example: torchmedic run train.py --epochs 3",
    )
    parser.add_argument("-V", "--version", action="version", version=f"torchmedic {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for command in COMMANDS:
        doc = (command.__doc__ or command.NAME).strip()  # `python -OO` removes docstrings
        verb = verbs.add_parser(
            command.NAME,
            help=doc.splitlines()[0].rstrip("."),
            description=doc,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        command.prepare(verb)
        verb.set_defaults(execute=command.execute)
    return parser
