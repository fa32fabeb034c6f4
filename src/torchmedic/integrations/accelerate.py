"""Accelerate: a tracker that watches the process from `init_trackers` to `end_training`.

    accelerator = Accelerator(log_with=TorchmedicTracker())

After `import torchmedic.integrations.accelerate`, `log_with="torchmedic"` does the same, from Accelerate 1.15 on. An
exception that ends the script is explained after its traceback. An exception that the script handles is explained if
`end_training` is called in its `except` or `finally` block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import tracking

from torchmedic.contained import contained
from torchmedic.diagnose.registry import is_fallback
from torchmedic.integrations.session import session_of_tool

if TYPE_CHECKING:
    from torchmedic.integrations.session import Session


class TorchmedicTracker(tracking.GeneralTracker):  # type: ignore[misc]
    """Logs nothing: its run is the watched part of the process."""

    name = "torchmedic"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str = "", **_: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._watching: Session | None = None
        self._handled: BaseException | None = None  # at the start: training may be a reaction to an earlier failure

    @property
    def tracker(self) -> Path | None:
        """The run folder, while the process is watched."""
        return self._watching.run if self._watching is not None else None

    def start(self) -> None:
        if self._watching is None:
            self._watching = session_of_tool(self.run_name or "accelerate")
            if self._watching is not None:
                self._watching.begin()
                self._handled = sys.exception()

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None: ...

    def finish(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            error = sys.exception()
            if isinstance(error, Exception) and error is not self._handled and _is_explained(error):
                watching.failed(error)
            self._handled = None
            watching.end()


@contained("integrations.accelerate")
def _is_explained(error: Exception) -> bool:
    """Whether a rule explains an exception. An exception that no rule explains may be a way to end the training."""
    from torchmedic.integrations.api import diagnose

    found = diagnose(error)
    return found is not None and not is_fallback(found)


tracking.LOGGER_TYPE_TO_CLASS[TorchmedicTracker.name] = TorchmedicTracker
