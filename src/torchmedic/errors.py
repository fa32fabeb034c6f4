"""Errors that are printed in one line, and the exit statuses.

* TorchmedicError
  + UsageError        the command line is wrong, or names something that does not exist
  + UnreadableRun     a run folder, or a file in it, cannot be read back
"""

from __future__ import annotations

import enum


class ExitStatus(enum.IntEnum):
    """Exit statuses of torchmedic's verbs; `run` returns the script's own."""

    OK = 0
    FAILED = 1
    USAGE = 2
    FINDINGS = 3


class TorchmedicError(Exception):
    """An expected error. Its text is the line that is printed."""

    exit_status = ExitStatus.FAILED


class UsageError(TorchmedicError):
    exit_status = ExitStatus.USAGE


class UnreadableRun(TorchmedicError):
    exit_status = ExitStatus.USAGE
