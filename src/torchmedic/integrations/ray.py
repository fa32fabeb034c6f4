"""Ray Train: has the training function of every worker watched.

    TorchTrainer(watched(train_loop_per_worker), scaling_config=..., run_config=...)

A callback of Ray runs in the process of the controller and gets an exception without its frames. So the function itself
is wrapped, and the exception is explained in the worker that raised it. Ray prints the text of a worker on the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import train

from torchmedic.contained import contained
from torchmedic.integrations.session import Session, session
from torchmedic.settings import load, working_folder

Loop = Callable[..., Any]


def watched(train_loop_per_worker: Loop) -> Loop:
    """Wrap a training function for Ray so that torchmedic watches it in every worker. A healthy call is left as it is.

    Args:
        train_loop_per_worker: With or without the argument `config`, as `TorchTrainer` takes it.
    """

    @functools.wraps(train_loop_per_worker)
    def loop(*args: Any) -> Any:
        watching = _session()
        if watching is None:
            return train_loop_per_worker(*args)
        watching.begin()
        try:
            return train_loop_per_worker(*args)
        except BaseException as error:
            watching.failed(error)
            raise
        finally:
            watching.end()

    return loop


def _session() -> Session | None:
    """The session of this worker. Its run folder lies in the storage of the run, where Ray puts results too."""
    settings = load({}, folder=working_folder())
    if settings.output is None:
        settings = load({"output": _storage()}, folder=working_folder())
    return session(settings, "ray")


@contained("integrations.ray")
def _storage() -> str | None:
    """A folder in the storage of the run; None if the storage is not a folder of this machine."""
    from pyarrow.fs import LocalFileSystem

    storage = train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, LocalFileSystem):
        return None
    return str(Path(storage.experiment_fs_path) / "torchmedic")
