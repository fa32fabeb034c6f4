"""The Python stacks of a process, read from outside by py-spy. Nothing here raises.

py-spy reads the interpreter's state from the memory of the process, so it also works while the GIL is held.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from typing import Any

import msgspec

from torchmedic.records.inside import PyFrame, PyThread
from torchmedic.source.user_code import is_user_file

MAX_SECONDS = 3.0
NOT_PERMITTED = "py-spy may not read the memory of the process"
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3\.\d+t?/")


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The result of py-spy. `native` has the C frames by thread, innermost first; `failure` is why there is no result.

    `addresses` has the addresses of the objects in local variables, by thread and then by frame.
    """

    threads: tuple[PyThread, ...] = ()
    native: dict[int, tuple[str, ...]] = {}
    addresses: dict[int, tuple[dict[str, int], ...]] = {}
    failure: str = ""


def executable() -> str | None:
    """The py-spy program of torchmedic's environment, or the one on the PATH."""
    name = "py-spy.exe" if os.name == "nt" else "py-spy"
    for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK):
            return path
    return shutil.which("py-spy")


def dump(pid: int, *, native: bool = False, values: bool = False, limit: float = MAX_SECONDS) -> Dump | None:
    """Run py-spy on a process; None if py-spy is not installed.

    Args:
        pid: The process.
        native: Include C frames. For these, py-spy stops the process for some milliseconds; otherwise it never does.
        values: Include the addresses of local variables.
        limit: Time limit in seconds.
    """
    program = executable()
    if program is None:
        return None
    command = [program, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    command += ["--native"] if native else ["--nonblocking"]
    command += ["--locals"] if values else []
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=limit,
            check=False,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        return Dump(failure=f"py-spy did not answer in {limit:.0f} s")
    except OSError as error:
        return Dump(failure=f"py-spy cannot be run: {error.strerror or error}")
    if done.returncode != 0:
        return Dump(failure=_reason(done.stderr.decode("utf-8", "replace")))
    return parse(done.stdout, pid)


def parse(answer: bytes, pid: int) -> Dump:
    """Read `py-spy dump --json`."""
    try:
        listed = [thread for thread in json.loads(answer) if isinstance(thread, dict)]
        return _read(listed, pid)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Dump(failure=f"py-spy's answer cannot be read: {error}")


def _read(listed: list[dict[str, Any]], pid: int) -> Dump:
    threads: list[PyThread] = []
    native: dict[int, tuple[str, ...]] = {}
    addresses: dict[int, tuple[dict[str, int], ...]] = {}
    for entry in listed:
        tid = int(entry.get("os_thread_id") or 0)
        name = str(entry.get("thread_name") or "")
        frames = [frame for frame in entry.get("frames") or () if isinstance(frame, dict)]
        python = [frame for frame in frames if not _is_native(frame)]
        threads.append(
            PyThread(
                ident=int(entry.get("thread_id") or 0),
                tid=tid,
                name=name,
                main=tid == pid or (not tid and name == "MainThread"),
                frames=tuple(_frame(frame) for frame in python),
                holds_gil=bool(entry.get("owns_gil")),
            )
        )
        addresses[tid] = tuple(_addresses(frame.get("locals") or ()) for frame in python)
        if len(python) < len(frames):
            native[tid] = tuple(_native_name(frame) for frame in frames if _is_native(frame))
    return Dump(threads=tuple(threads), native=native, addresses=addresses)


def _frame(frame: dict[str, Any]) -> PyFrame:
    """A frame of py-spy, with the class removed from the name of a method."""
    file = str(frame.get("filename") or "")
    function = str(frame.get("name") or "").rpartition(".")[2]
    line, user = int(frame.get("line") or 0), is_user(file)
    code = linecache.getline(file, line).strip()[:200] if user else ""
    return PyFrame(file=file, line=line, function=function, user=user, code=code)


def is_user(file: str) -> bool:
    """Whether a file is the user's own. The process may use another Python, which is recognised by its path."""
    return is_user_file(file) and not _STANDARD_LIBRARY.search(file)


def _is_native(frame: dict[str, Any]) -> bool:
    return bool(frame.get("module")) or not frame.get("filename") or not frame.get("line")


def _native_name(frame: dict[str, Any]) -> str:
    library = os.path.basename(str(frame.get("module") or frame.get("filename") or ""))
    return f"{frame.get('name')} ({library})" if library else str(frame.get("name"))


def _addresses(listed: Iterable[dict[str, Any]]) -> dict[str, int]:
    return {str(entry.get("name")): int(entry.get("addr") or 0) for entry in listed}


def _reason(complaint: str) -> str:
    """The reason in py-spy's error output: the last `Error:` or `Reason:`, which is the innermost."""
    if "permission denied" in complaint.lower() or "operation not permitted" in complaint.lower():
        return NOT_PERMITTED
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    telling = [line.partition(":")[2].strip() for line in lines if line.startswith(("Error:", "Reason:"))]
    if not telling:
        return f"py-spy failed: {lines[0] if lines else 'it said nothing'}"
    return f"py-spy: {telling[-1]}"
