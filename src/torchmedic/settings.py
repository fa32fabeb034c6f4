"""What a user can set, and where it may be set: defaults < pyproject < TORCHMEDIC_* < flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from torchmedic.errors import UsageError

Format = Literal["full", "concise", "json"]
FailOn = Literal["error", "warning", "never"]
OnStall = Literal["report", "kill", "checkpoint"]

# How the parent finds its agents, and they their parent. Not for users.
RUN_DIR_VARIABLE = "TORCHMEDIC_RUN_DIR"
HOME_VARIABLE = "TORCHMEDIC_HOME"
HIDE_VARIABLE = "TORCHMEDIC_HIDE"

# Where tests put a cgroup tree of their own: a real one takes root, and a real kill takes all the memory.
CGROUP_VARIABLE = "TORCHMEDIC_CGROUP_ROOT"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `torchmedic run`. Each has a key in [tool.torchmedic], a TORCHMEDIC_* variable and mostly a flag.

    `checkup` is whether to look for mistakes that raise nothing (TM6xx), `ignore` the codes of those not to be told of.
    `stall_after` is after how many seconds without progress a run is examined: None is learned, 0 is never.
    """

    output: str | None = None
    format: Format = "full"
    fail_on: FailOn = "never"
    confidential: bool = False
    checkup: bool = True
    stall_after: Annotated[float, msgspec.Meta(ge=0)] | None = None
    on_stall: OnStall = "report"
    ignore: tuple[str, ...] = ()


def load(flags: Mapping[str, Any], *, folder: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Merge the four sources.

    Args:
        flags: Values from the command line; None means that the flag was not given.
        folder: Where the search for pyproject.toml begins, upwards.
        environ: The environment, the process's own by default.

    Raises:
        UsageError: A source holds a key or a value that does not exist.
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


def rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Which process of a distributed job this is, as its launcher says; None where there is no launcher."""
    environ = os.environ if environ is None else environ
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def _from_pyproject(folder: Path) -> dict[str, Any]:
    for candidate in (folder, *folder.parents):
        try:
            text = (candidate / "pyproject.toml").read_text(encoding="utf-8")
            tool = tomllib.loads(text).get("tool")
        except FileNotFoundError:
            continue
        except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError):
            return {}  # a broken pyproject is its owner's business, not a reason to refuse to run
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
