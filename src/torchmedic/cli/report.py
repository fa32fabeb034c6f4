"""Show the diagnoses of a run.

examples:
  torchmedic report .torchmedic/2026-11-15T010203-train
  torchmedic report --html --open .torchmedic/2026-11-15T010203-train
  torchmedic report --format prompt .torchmedic/2026-11-15T010203-train
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from torchmedic.errors import ExitStatus, TorchmedicError, UsageError
from torchmedic.settings import Format

NAME = "report"


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or its report.json")
    parser.add_argument("-f", "--format", choices=get_args(Format), help="how the findings are shown (default: full)")
    parser.add_argument("--notes", action="store_true", help="also show notes: advice about harmless findings")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=0, help="most tokens of --format prompt (default: 1500)"
    )
    parser.add_argument("--html", action="store_true", help="write a report.html: one file that needs no network")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="where to write (default: report.html in the run folder)"
    )
    parser.add_argument("--open", action="store_true", help="show the report.html in the browser")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.supervise.abandoned import read_report

    if args.html or args.open:
        if args.format is not None:
            raise UsageError("--html and --format cannot be combined")
        return _html(args.run, args.output, show=args.open)
    report = read_report(args.run)
    folder = args.run if args.run.is_dir() else args.run.parent
    shown = [diagnosis for diagnosis in report.diagnoses if args.notes or diagnosis.severity != "note"]
    if args.format in (None, "full"):
        if args.output is not None:
            raise UsageError("--output needs --html, or a --format other than full")
        from torchmedic.report import terminal
        from torchmedic.report.console import stdout_console

        console = stdout_console()
        terminal.print_all(console, shown, "full", folder)
        if not shown:
            console.print(f"nothing was found: {report.outcome.steps} steps, exit status {report.outcome.exit_status}")
        return ExitStatus.OK
    from torchmedic.records.plain_text import visible
    from torchmedic.report import formats

    lines = (formats.line(diagnosis, args.format) for diagnosis in shown)
    text = "".join(f"{line}\n" for line in lines if line is not None)
    text += formats.document(report, args.format, folder, notes=args.notes, tokens=args.tokens)
    if args.output is None:
        sys.stdout.write(visible(text))
    else:
        _write(args.output, text.encode("utf-8", "replace"))
    return ExitStatus.OK


def _html(run: Path, output: Path | None, *, show: bool) -> int:
    from torchmedic.report.console import stdout_console
    from torchmedic.report.html import page, run_data
    from torchmedic.runfolder import files

    folder = run if run.is_dir() else run.parent
    path = output or folder / files.HTML
    _write(path, page.render(run_data.read(run)))
    stdout_console().print(f"wrote {path}", soft_wrap=True)
    if show:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            raise TorchmedicError(f"there is no browser to open {path} with")
    return ExitStatus.OK


def _write(path: Path, data: bytes) -> None:
    from torchmedic.runfolder import files

    try:
        files.write_atomically(path, data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
