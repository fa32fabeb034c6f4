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
from torchmedic.runfolder import files, layout
from torchmedic.settings import Settings, rank, working_folder
from torchmedic.supervise.boxes import BoxKeeper
from torchmedic.supervise.child import launch, tee
from torchmedic.supervise.child.fatal_dump import FatalDump
from torchmedic.supervise.child.kernel_messages import KernelMessages
from torchmedic.supervise.child.signals import Forwarder, shell_status
from torchmedic.supervise.child.stderr_file import TICK_SECONDS, Stream
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
    number = rank() if job else None
    folder = _run_folder(settings, name, job, number)
    environment = dict(os.environ) if folder is None else launch.environment(folder, hide=hide)
    faults: list[Fault] = []
    on_fault(faults.append, str(folder or ""))
    messages = KernelMessages(folder, number) if folder is not None else None
    boxes = contained("supervise.boxes")(BoxKeeper)(folder, number) if folder is not None else None
    forwarder = Forwarder()
    dump = FatalDump()

    def hear(data: bytes) -> None:
        if messages is not None:
            messages.feed(data)
        dump.feed(data)

    stream = contained("supervise.tee")(tee.choose)(hear) if folder is not None else None
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

        def watch() -> float:
            stream.look()
            if messages is not None:
                messages.flush()
            if boxes is not None:
                boxes.look()
            if supervisor is None:
                return TICK_SECONDS
            return min(supervisor.watch(child.pid), stream.pause)

        status = forwarder.wait(child, watch)
        forwarder.hold_on()
        try:
            contained("supervise.tee_end")(stream.finish)()
            if messages is not None:
                messages.flush()
            if boxes is not None:
                boxes.close()
            if folder is not None and status < 0:
                dump.save(folder, child.pid)
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
        if boxes is not None:
            boxes.close()
        forwarder.release()


def _run_folder(settings: Settings, name: str, job: str | None, rank: int | None) -> Path | None:
    """A new run folder that can be written to; None where there is none, and then the script runs as without us."""
    cwd, output = working_folder(), settings.output
    if output is not None and not cwd.is_absolute() and not os.path.isabs(output):
        output = None  # the working folder has been deleted
    try:
        folder = layout.create(output, name, cwd, job)
        files.write_supervisor(folder, rank)
        (folder / files.STACKS).mkdir(mode=0o700, exist_ok=True)
        if settings.confidential:
            layout.mark_confidential(folder)
        if not settings.checkup:
            layout.mark_no_checkup(folder)
    except OSError as error:
        sys.stderr.write(f"torchmedic: not watching, no run folder can be written: {error.strerror or error}\n")
        return None
    return folder


def _supervisor(folder: Path, settings: Settings, rank: int | None, stream: Stream) -> Supervisor:
    from torchmedic.supervise.supervisor import Supervisor

    return Supervisor(folder, settings, rank, stream.speaking)
