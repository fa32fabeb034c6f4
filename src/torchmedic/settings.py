"""The settings, from four sources in rising priority: defaults, pyproject.toml, TORCHMEDIC_* variables, flags.

Also the rank and the job of this process, which its launcher sets.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from torchmedic.errors import UsageError

Format = Literal["full", "concise", "json", "jsonl", "github", "sarif", "markdown", "prompt"]
FailOn = Literal["error", "warning", "never"]
OnStall = Literal["report", "kill", "checkpoint"]
Recover = Literal["off", "safe", "all"]

# Set by the parent for the agents in its child processes. Not for users.
RUN_DIR_VARIABLE = "TORCHMEDIC_RUN_DIR"
HOME_VARIABLE = "TORCHMEDIC_HOME"
HIDE_VARIABLE = "TORCHMEDIC_HIDE"

_OUR_TABLE = re.compile(rb"^\s*\[?\s*tool\s*\.\s*torchmedic\b", re.MULTILINE)

# A cgroup tree made by a test: a real tree needs root, and a real out-of-memory kill needs all the memory.
CGROUP_VARIABLE = "TORCHMEDIC_CGROUP_ROOT"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `torchmedic run`. Each has a key in [tool.torchmedic] and a TORCHMEDIC_* variable, most have a flag.

    `checkup` enables the search for mistakes that raise no error (TM6xx); the codes in `ignore` are not reported.
    `stall_after` is the number of seconds without progress after which a run is examined: None means learned from the
    run, 0 means never. `hold` is the number of seconds for which a failing step is kept alive for `torchmedic try`.
    `recover` tells whether a run goes on after an out-of-memory, and how far that may go.
    `output` is the folder in which every run gets a folder of its own (default: `.torchmedic`); the flag `--output`
    names the folder of one run instead.
    """

    output: str | None = None
    format: Format = "full"
    fail_on: FailOn = "never"
    confidential: bool = False
    checkup: bool = True
    stall_after: Annotated[float, msgspec.Meta(ge=0)] | None = None
    on_stall: OnStall = "report"
    hold: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    recover: Recover = "off"
    ignore: tuple[str, ...] = ()


def load(flags: Mapping[str, Any], *, folder: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Merge the four sources.

    Args:
        flags: Values from the command line; None for a flag that was not given.
        folder: Where the upward search for pyproject.toml begins.
        environ: The environment, by default that of this process.

    Raises:
        UsageError: A source contains an unknown key or an invalid value.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for source, given in (
        ("[tool.torchmedic]", _from_pyproject(folder)),
        ("the environment", _from_environment(environ)),
        ("the command line", {key: value for key, value in flags.items() if value is not None}),
    ):
        try:
            msgspec.convert(given, Settings, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"bad setting in {source}: {error}") from None
        values |= given
    return msgspec.convert(values, Settings, strict=False)


def working_folder() -> Path:
    """The working folder. It may have been deleted, and a script that needs none runs all the same."""
    try:
        return Path.cwd()
    except OSError:
        return Path(os.curdir)


def rank(environ: Mapping[str, str] | None = None) -> int | None:
    """The rank of this process in a distributed job, from the launcher's variables; None without a launcher."""
    environ = os.environ if environ is None else environ
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def _from_pyproject(folder: Path) -> dict[str, Any]:
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        try:
            if not path.is_file():  # a pipe would be waited for
                continue
            content = path.read_bytes()
        except OSError:
            return {}
        import tomllib  # takes long to import, and is needed only where there is such a file

        try:
            tool = tomllib.loads(content.decode()).get("tool")
        except (ValueError, RecursionError) as error:
            if _OUR_TABLE.search(content):  # `confidential` may be among what cannot be read
                raise UsageError(f"cannot read [tool.torchmedic] in {path}: {error}") from None
            return {}  # another broken pyproject.toml is no reason to refuse to run
        section = tool.get("torchmedic", {}) if isinstance(tool, dict) else {}
        if not isinstance(section, dict):
            raise UsageError("bad setting in [tool.torchmedic]: it is not a table")
        return {key.replace("-", "_"): value for key, value in section.items()}
    return {}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: environ[f"TORCHMEDIC_{name.upper()}"]
        for name in Settings.__struct_fields__
        if environ.get(f"TORCHMEDIC_{name.upper()}")
    }
    if "ignore" in given:
        given["ignore"] = given["ignore"].replace(",", " ").split()
    return given


def job_identity(environ: Mapping[str, str]) -> str | None:
    """A text that identifies one launch: the same for all its local ranks. None if there is only one rank."""
    sizes = (environ.get(name, "") for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if not any(size.isdecimal() and int(size) > 1 for size in sizes):
        return None
    named = [
        environ.get(name, "")
        for name in (
            "TORCHELASTIC_RUN_ID",
            "MASTER_PORT",
            "TORCHELASTIC_RESTART_COUNT",
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
        )
    ]
    # Run ids and ports are used again; the launcher, which is our parent, is unique.
    return ":".join([*named, str(os.getppid()), _start_of_process(os.getppid())])


def _start_of_process(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        # The process name comes first and may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    import psutil

    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).create_time())
    return ""
