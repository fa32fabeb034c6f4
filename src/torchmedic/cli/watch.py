"""Watch a run from another terminal: phase, speed, memory, GPUs, the last diagnosis.

examples:
  torchmedic watch
  torchmedic watch .torchmedic/2026-11-15T010203-train

Without a folder it is the newest run under .torchmedic. The view ends with the run or with Ctrl-C, which leaves the run
alone. Where the output is not a terminal, one snapshot is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from torchmedic.errors import ExitStatus

NAME = "watch"
_INTERVAL = 0.5
_LAST_WORDS = 5.0  # seconds for the parent of a process that is gone to say why


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", type=Path, help="a run folder (default: the newest)")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.report import live
    from torchmedic.report.console import stdout_console
    from torchmedic.supervise.watching import Watch, find_run

    watch = Watch(find_run(args.run, Path.cwd()))
    console = stdout_console()
    view = watch.look()
    if not console.is_terminal or console.is_dumb_terminal or not sys.stdout.isatty():
        console.print(live.render(view))
    else:
        from rich.live import Live

        # The cursor is hidden meanwhile, and must come back.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, _leave)
        shown = Live(live.render(view), console=console, auto_refresh=False)
        try:  # and not `with`, which Ctrl-C can hit before it has begun
            shown.start(refresh=True)
            gone = 0.0
            while view.state in ("waiting", "running") or (view.state == "gone" and gone < _LAST_WORDS):
                time.sleep(_INTERVAL)
                gone = gone + _INTERVAL if view.state == "gone" else 0.0
                view = watch.look()
                console.width = max(shutil.get_terminal_size((80, 24)).columns, 40)
                shown.update(live.render(view), refresh=True)
        finally:
            shown.stop()
    if view.state in ("ended", "gone"):
        console.print(live.ending(view))
    return ExitStatus.OK


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
