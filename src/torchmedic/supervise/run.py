"""One run from start to end. The child is started first; modules for the supervision are loaded while it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.contained import contained, fault_line, on_fault
from torchmedic.errors import UsageError
from torchmedic.records import Fault
from torchmedic.runfolder import layout
from torchmedic.settings import Settings, rank
from torchmedic.supervise.child import launch, tee
from torchmedic.supervise.child.kernel_messages import KernelMessages
from torchmedic.supervise.child.signals import Forwarder, shell_status
from torchmedic.supervise.child.stderr_file import Stream
from torchmedic.supervise.job import identity

if TYPE_CHECKING:
    from torchmedic.supervise.supervisor import Supervisor


def run(command: Sequence[str], settings: Settings, *, name: str, hide: bool) -> int:
    """Run a command under supervision, and return its exit status, which `--fail-on` may raise.

    Args:
        command: The command.
        settings: The user's settings.
        name: A name for the run folder.
        hide: Whether to hide the added environment variables from the script. Must be false for a shell or a launcher,
            which passes its environment on.
    """
    job = identity(os.environ)
    folder = _run_folder(settings, name, job)
    environment = dict(os.environ) if folder is None else launch.environment(folder, hide=hide)
    faults: list[Fault] = []
    on_fault(faults.append)
    number = rank() if job else None
    messages = KernelMessages(folder, number) if folder is not None else None
    forwarder = Forwarder()
    stream = contained("supervise.tee")(tee.choose)(messages.feed) if messages is not None else None
    stream = stream or Stream()
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
            if messages is not None:
                messages.flush()
            if supervisor is not None:
                supervisor.watch(child.pid)

        status = forwarder.wait(child, watch)
        forwarder.hold_on()
        try:
            contained("supervise.tee_end")(stream.finish)()
            if messages is not None:
                messages.flush()
            if supervisor is None:
                sys.stderr.writelines(fault_line(fault) for fault in faults[:1])
                return shell_status(status)
            for fault in faults:
                supervisor.note_fault(fault)  # from before the supervisor existed
            return supervisor.conclude(child.pid, status, through_shell=not hide)
        finally:
            with contextlib.suppress(Exception):
                stream.let_go()
    finally:
        forwarder.release()


def _run_folder(settings: Settings, name: str, job: str | None) -> Path | None:
    try:
        folder = layout.create(settings.output, name, Path(os.getcwd()), job)
        if settings.confidential:
            layout.mark_confidential(folder)
        if not settings.checkup:
            layout.mark_no_checkup(folder)
    except OSError as error:
        sys.stderr.write(f"torchmedic: not watching, no run folder can be made: {error.strerror or error}\n")
        return None
    return folder


def _supervisor(folder: Path, settings: Settings, rank: int | None, stream: Stream) -> Supervisor:
    from torchmedic.supervise.supervisor import Supervisor

    return Supervisor(folder, settings, rank, stream.speaking)
