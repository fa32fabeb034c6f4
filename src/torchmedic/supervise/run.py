"""One run from start to end. The child is started first; modules for the supervision are loaded while it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchmedic.contained import contained, fault_line, on_fault
from torchmedic.errors import UsageError
from torchmedic.records import Fault
from torchmedic.records.plain_text import visible
from torchmedic.runfolder import files, held, layout
from torchmedic.runfolder.confidential import in_use, mark_confidential, shown_fault
from torchmedic.settings import Settings, job_identity, rank, working_folder
from torchmedic.supervise.boxes import BoxKeeper
from torchmedic.supervise.child import launch, tee
from torchmedic.supervise.child.kernel_messages import FatalDump, KernelMessages
from torchmedic.supervise.child.signals import Forwarder, shell_status
from torchmedic.supervise.child.stderr_file import TICK_SECONDS, Stream

if TYPE_CHECKING:
    from torchmedic.supervise.supervisor import Supervisor


def run(command: Sequence[str], settings: Settings, *, name: str, hide: bool, output: str | None = None) -> int:
    """Run a command under supervision, and return its exit status, which `--fail-on` may raise.

    Args:
        command: The command.
        settings: The user's settings.
        name: A name for the run folder.
        hide: Whether to hide the added environment variables from the script. Must be false for a shell or a launcher,
            which passes its environment on.
        output: The run folder from the command line. The setting `output` is a folder for the folders of all runs.
    """
    job = job_identity(os.environ)
    number = rank() if job else None
    with contextlib.ExitStack() as kept:
        folders = new_run_folder(settings, "run" if settings.confidential else name, job, output, number)
        if folders is not None:
            kept.enter_context(in_use(folders.work))
        return _run(command, settings, folders, number, hide=hide)


class Folders(NamedTuple):
    """The run folder, and the folder in which the processes work: the same unless the run is confidential."""

    run: Path
    work: Path


def _run(command: Sequence[str], settings: Settings, folders: Folders | None, number: int | None, *, hide: bool) -> int:
    work = folders.work if folders is not None else None
    environment = dict(os.environ) if work is None else launch.environment(work, hide=hide)
    faults: list[Fault] = []
    on_fault(faults.append, str(work or ""))
    messages = KernelMessages(work, number) if work is not None else None
    boxes = contained("supervise.boxes")(BoxKeeper)(work, number) if work is not None else None
    forwarder = Forwarder()
    dump = FatalDump()

    def hear(data: bytes) -> None:
        if messages is not None:
            messages.feed(data)
        dump.feed(data)

    stream = contained("supervise.tee")(tee.choose)(hear) if work is not None else None
    stream = stream or Stream()
    try:
        try:
            child = launch.start(command, environment, forwarder.inherited, **stream.given)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
        stream.start()
        supervisor = None
        if folders is not None:
            supervisor = contained("supervise.start")(_supervisor)(folders, settings, number, stream)

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
        alone = status < 0 and not forwarder.has_received(-status)
        forwarder.hold_on()
        try:
            contained("supervise.tee_end")(stream.finish)()
            if messages is not None:
                messages.flush()
            if boxes is not None:
                boxes.close()
            if work is not None and status < 0:
                dump.save(work, child.pid)
            if supervisor is None:
                shown = [shown_fault(fault) if settings.confidential else fault for fault in faults[:1]]
                sys.stderr.writelines(fault_line(fault) for fault in shown)
                return shell_status(status)
            for fault in faults:
                supervisor.note_fault(fault)  # from before the supervisor existed
            return supervisor.conclude(child.pid, status, through_shell=not hide, alone=alone)
        finally:
            with contextlib.suppress(Exception):
                stream.let_go()
    finally:
        if boxes is not None:
            boxes.close()
        forwarder.release()


def new_run_folder(
    settings: Settings, name: str, job: str | None, output: str | None, rank: int | None
) -> Folders | None:
    """A new run folder that can be written to; None where there is none, and then the script runs as without us."""
    cwd = working_folder()
    if output is not None and not cwd.is_absolute() and not os.path.isabs(output):
        output = None  # the working folder has been deleted
    try:
        run = layout.create(output, name, cwd, job, parent=settings.output)
        files.write_supervisor(run, rank)
        work = mark_confidential(run) if settings.confidential else run
        layout.new_folder(work / files.STACKS, exist_ok=True)
        if not settings.confidential:
            files.write_settings(run, settings)
        if settings.hold:
            held.mark(work, settings.hold)
        if not settings.checkup:
            layout.mark_no_checkup(work)
        if settings.recover != "off":
            layout.mark_recovery(work, settings.recover)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = visible(getattr(error, "strerror", None) or str(error))
        sys.stderr.write(f"torchmedic: not watching, no run folder can be written: {reason}\n")
        return None
    return Folders(run, work)


def _supervisor(folders: Folders, settings: Settings, rank: int | None, stream: Stream) -> Supervisor:
    from torchmedic.supervise.supervisor import Supervisor

    return Supervisor(folders.run, settings, rank, stream.speaking, work=folders.work)
