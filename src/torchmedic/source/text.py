"""Lines of source and how files are named in a report."""

from __future__ import annotations

import linecache
import os


def source_line(file: str, line: int) -> str:
    """One line without its newline; empty where the source is missing."""
    return linecache.getline(file, line).rstrip("\n")


def relative(file: str) -> str:
    """A path relative to the working directory where it lies below it."""
    if file.startswith("<"):
        return file
    try:
        path = os.path.relpath(file)
    except (ValueError, OSError):
        return file
    return file if path.startswith("..") else path
