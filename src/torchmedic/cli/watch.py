"""Watch a run from another terminal: phase, speed, memory, GPUs, the last diagnosis.

examples:
  torchmedic watch
  torchmedic watch .torchmedic/2026-11-15T010203-train

The default is the newest run under .torchmedic. The view ends with the run, or with Ctrl-C, which does not stop the
run. If the output is not a terminal, one snapshot is printed.
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

from torchmedic.errors import ExitStatus, UnreadableRun

NAME = "watch"
_INTERVAL_SECONDS = 0.5
_MAX_END_SECONDS = 5.0  # after a process is gone, for its supervisor to write the outcome


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", type=Path, help="a run folder (default: the newest)")


def execute(args: argparse.Namespace) -> int:
    from torchmedic.report import live
    from torchmedic.report.console import stdout_console
    from torchmedic.supervise.watching import Watch, find_run

    watch = Watch(find_run(args.run, Path.cwd()))
    console = stdout_console()
    view = watch.look()
    if view.damage and not view.processes:
        raise UnreadableRun(view.damage)  # there is nothing to show
    if not console.is_terminal or console.is_dumb_terminal or not sys.stdout.isatty():
        console.print(live.render(view))
    else:
        from rich.live import Live

        # Live hides the cursor, which must be shown again.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, _leave)
        shown = Live(live.render(view), console=console, auto_refresh=False)
        try:  # not `with`: Ctrl-C could come before the block is entered
            shown.start(refresh=True)
            gone = 0.0
            while view.state in ("waiting", "running") or (view.state == "gone" and gone < _MAX_END_SECONDS):
                time.sleep(_INTERVAL_SECONDS)
                gone = gone + _INTERVAL_SECONDS if view.state == "gone" else 0.0
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
