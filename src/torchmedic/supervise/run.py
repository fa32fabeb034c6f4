"""One run from start to end. The child is started first, and what only the watching needs is loaded beside it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.contained import contained, on_fault, owning_up
from torchmedic.errors import UsageError
from torchmedic.records import Fault
from torchmedic.runfolder import layout
from torchmedic.settings import Settings, rank
from torchmedic.supervise.child import launch, tee
from torchmedic.supervise.child.kernel_messages import Overheard
from torchmedic.supervise.child.signals import Forwarder, shell_status
from torchmedic.supervise.job import identity

if TYPE_CHECKING:
    from torchmedic.supervise.supervisor import Supervisor


def run(command: Sequence[str], settings: Settings, *, name: str, hide: bool) -> int:
    """Run a command under supervision; the exit status is the command's own unless `--fail-on` raises it.

    Args:
        command: What to start.
        settings: The user's.
        name: What the run folder is called after.
        hide: Whether the script shall not see what is added to its environment. Else the command may be a shell or a
            launcher, which passes its environment on.
    """
    job = identity(os.environ)
    try:
        folder = layout.create(settings.output, name, Path(os.getcwd()), job)
        if settings.confidential:
            layout.mark_confidential(folder)
        if not settings.checkup:
            layout.mark_no_checkup(folder)
    except OSError as error:
        sys.stderr.write(f"torchmedic: not watching, no run folder can be made: {error.strerror or error}\n")
        folder = None
    environment = dict(os.environ) if folder is None else launch.environment(folder, hide=hide)
    faults: list[Fault] = []
    on_fault(faults.append)
    number = rank() if job else None
    heard = Overheard(folder, number) if folder is not None else None
    forwarder = Forwarder()
    stream = contained("supervise.tee")(tee.choose)(heard.feed) if heard is not None else None
    stream = stream or tee.Stream()
    forwarder.speaking = stream.speaking
    try:
        try:
            child = launch.start(command, environment, forwarder.inherited, **stream.given)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
        stream.start()
        supervisor = None
        if folder is not None:
            supervisor = contained("supervise.start")(_supervisor)(folder, settings, number, stream)

        def watch() -> None:
            stream.look()
            if heard is not None:
                heard.look()
            if supervisor is not None:
                supervisor.watch(child.pid)

        status = forwarder.wait(child, watch)
        forwarder.hold_on()
        try:
            contained("supervise.tee_end")(stream.finish)()
            if heard is not None:
                heard.look()
            if supervisor is None:
                sys.stderr.writelines(owning_up(fault) for fault in faults[:1])
                return shell_status(status)
            for fault in faults:
                supervisor.note_fault(fault)  # from before there was one to tell
            return supervisor.conclude(child.pid, status, killed=forwarder.killed, through_shell=not hide)
        finally:
            with contextlib.suppress(Exception):
                stream.let_go()
    finally:
        forwarder.release()


def _supervisor(folder: Path, settings: Settings, rank: int | None, stream: tee.Stream) -> Supervisor:
    from torchmedic.supervise.supervisor import Supervisor

    return Supervisor(folder, settings, rank, stream.speaking)
