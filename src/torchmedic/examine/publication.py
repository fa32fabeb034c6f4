"""Findings of a process that goes on -> its run folder. Each is written once, unless the user has suppressed it.

`# torchmedic: ignore` at a line suppresses everything that is found there, `# torchmedic: ignore[TM603]` some codes.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Set

import msgspec

from torchmedic.observe.context import ProcessContext, ReportingProcess
from torchmedic.observe.stages import Finding
from torchmedic.records import Diagnosis
from torchmedic.runfolder.files import write_diagnosis

_COMMENT = re.compile(r"#\s*torchmedic:\s*ignore(?:\[([^\]]*)\])?")


class Said:
    """What has been said of mistakes that raise nothing. Lives as long as the agent."""

    def __init__(self) -> None:
        self._places: set[tuple[str, str, int]] = set()  # code, file and line
        self.holders: set[str] = set()  # names of holders that grow

    def note(self, diagnosis: Diagnosis) -> None:
        self._places.add(_place(diagnosis))

    def has(self, diagnosis: Diagnosis) -> bool:
        """Whether a diagnosis with this code was said of this line."""
        return _place(diagnosis) in self._places

    def has_code(self, codes: Set[str]) -> bool:
        return any(place[0] in codes for place in self._places)

    def has_line(self, diagnosis: Diagnosis) -> bool:
        """Whether anything was said of the line that a diagnosis blames, whatever its code."""
        cause = diagnosis.cause_location
        return cause is not None and any(place[1:] == (cause.file, cause.line) for place in self._places)


def _place(diagnosis: Diagnosis) -> tuple[str, str, int]:
    cause = diagnosis.cause_location
    return (diagnosis.code, cause.file, cause.line) if cause is not None else (diagnosis.code, "", 0)


def publish_silent(diagnosis: Diagnosis, process: ReportingProcess, said: Said) -> None:
    """Report a mistake that raises nothing, once per code and line, unless the user has suppressed it."""
    if said.has(diagnosis) or is_suppressed(diagnosis):
        return
    said.note(diagnosis)
    folder = process.open()
    folder.events.write("silent", code=diagnosis.code, step=diagnosis.step)
    write_diagnosis(folder.path, diagnosis)


def publish_finding(finding: Finding, agent: ProcessContext) -> None:
    """Report a number that is NaN or infinite and reaches the weights, with the operation that made it."""
    folder = agent.open()
    if finding.diagnosis.severity == "error":
        folder.events.write("nonfinite", symptom="nan", step=finding.diagnosis.step)
    if finding.trace is not None:
        folder.events.write("number-trace", **msgspec.to_builtins(finding.trace))
    number = write_diagnosis(folder.path, finding.diagnosis)
    if finding.recording is not None:
        finding.recording.write(folder.path, number)
    if finding.hold is not None:
        finding.hold()


def is_suppressed(diagnosis: Diagnosis) -> bool:
    """Whether the line to blame carries the comment."""
    cause = diagnosis.cause_location
    if cause is None:
        return False
    found = _COMMENT.search(linecache.getline(os.path.abspath(cause.file), cause.line) or cause.code)
    return found is not None and (found[1] is None or diagnosis.code in re.split(r"[\s,]+", found[1].strip()))
