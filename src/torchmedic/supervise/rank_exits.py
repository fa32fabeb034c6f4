"""A rank that ended by `sys.exit()`: where nothing else is known, its launcher only tells that a process failed."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import msgspec

from torchmedic.diagnose.words.death import line_location
from torchmedic.records import Diagnosis, StackFrame, Treatment
from torchmedic.records.ranks import Leaving
from torchmedic.runfolder import files, layout, reading
from torchmedic.source.branches import callees_at
from torchmedic.source.syntax import calls_in, syntax_tree
from torchmedic.supervise.deaths import ECHOES
from torchmedic.supervise.ranks import rank_of

_READS_OPTIONS = {"parse_args", "parse_known_args"}
_LOCAL_RANK = 'torchrun passes no such option: give it the default `int(os.environ["LOCAL_RANK"])`'


def with_exit(run: Path, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of a launcher's exception, with the rank and the line that ended the process; else as it is."""
    if not diagnosis.cause.startswith(ECHOES):
        return diagnosis
    found: list[tuple[int, Leaving]] = []
    for folder in layout.process_folders(run):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append((rank_of(folder), reading.decode(reading.read(folder / files.LEAVING), Leaving)))
    exits = sorted(((rank, left) for rank, left in found if left.has_failed), key=lambda pair: pair[0])
    if not exits:
        return diagnosis
    rank, left = exits[0]
    others = ", and its launcher has ended the others" if len(exits) == 1 else ", as others did"
    advice = (Treatment(title=_LOCAL_RANK, safety="edit"),) if _asks_for_local_rank(left.frame) else ()
    return msgspec.structs.replace(
        diagnosis,
        treatments=(*diagnosis.treatments, *advice),
        rank=rank,
        message=f"rank {rank}: the script ended by `{left.how}`{others}",
        cause="its exit status is not 0: the launcher takes it for a failure",
        locations=(line_location("cause", left.frame.file, left.frame.line, f"rank {rank} left the job here"),),
    )


def _asks_for_local_rank(frame: StackFrame) -> bool:
    """Whether the process ended where it reads its options, and the local rank is one that must be given."""
    options = {
        argument.value
        for call in calls_in(syntax_tree(frame.file), "add_argument")
        if any(keyword.arg == "required" for keyword in call.keywords)
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    return bool(callees_at(frame.file, frame.line) & _READS_OPTIONS and options & {"--local_rank", "--local-rank"})
