"""A new process imports the script, and the import starts processes again.

What: a process that was started with `spawn` or `forkserver` imports the script that started it. The script starts
processes at its top level, so the import does it too. Python refuses that.

Why: the statement that starts the processes (a DataLoader with workers, `mp.spawn`, a pool) is not under
`if __name__ == "__main__":`. With `fork`, nothing is imported again, so the script works. Windows and macOS use
`spawn`, and Python 3.14 uses `forkserver` on Linux.

Cure: put the statements that do the work under `if __name__ == "__main__":`. Classes and functions stay outside.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import frames_of


@rule("TM841", "missing-main-guard")
def check(evidence: RaisedEvidence) -> Draft | None:
    frames = frames_of(evidence.incident.error.__traceback__)
    if not frames or frames[-1].function != "_check_not_importing_main":
        return None
    script = next((frame for frame in frames if frame.is_user and frame.function == "<module>"), None)
    if script is None:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = "a new process imported this script, and the import would start processes again"
    draft.cause = 'this statement runs at every import: it is not under `if __name__ == "__main__":`'
    draft.at(script.location("cause", "runs in each new process, too"))
    draft.at(*evidence.at_user_line("surfaced", "starts processes"))
    draft.because("a process that is started with `spawn` or `forkserver` imports the script first")
    return draft.help('put this statement under `if __name__ == "__main__":`')
