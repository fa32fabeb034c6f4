"""Ranks that the script starts itself, with an environment of their own: Lightning's `ddp` runs the script once more.

torchmedic's variables are hidden from `os.environ`, so that a copy of it lacks them, and the rank would not be watched.
Children without an environment of their own inherit the variables from the C environment.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any

from torchmedic.contained import contained
from torchmedic.observe.hooks import patches
from torchmedic.settings import HIDE_VARIABLE, HOME_VARIABLE, RUN_DIR_VARIABLE

_MARKS = ("LOCAL_RANK", "RANK")  # an environment with one of these is that of a rank


def install() -> None:
    if os.name == "posix":
        patches.wrap(subprocess.Popen, "__init__", _around)


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    completed = contained("observe.started_ranks")(_completed)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        environment = kwargs.get("env")
        if environment is not None:
            kwargs["env"] = completed(environment) or environment
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            patches.without_our_frame(error)
            raise

    return __init__


def _completed(environment: Any) -> dict[str, str] | None:
    """The environment of a rank with torchmedic's variables; None if it is no rank's, or has them."""
    if not any(name in environment for name in _MARKS) or RUN_DIR_VARIABLE in environment:
        return None
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    hidden = {name: getenv(name.encode()) for name in (RUN_DIR_VARIABLE, HOME_VARIABLE, HIDE_VARIABLE, "PYTHONPATH")}
    if hidden[RUN_DIR_VARIABLE] is None:
        return None
    own = {name: os.fsdecode(value) for name, value in hidden.items() if value is not None}
    ours = own.pop("PYTHONPATH", "").partition(os.pathsep)[0]  # `launch.environment` puts our folder first
    path = os.pathsep.join(filter(None, [ours, environment.get("PYTHONPATH", "")]))
    return {**environment, **own, "PYTHONPATH": path}
