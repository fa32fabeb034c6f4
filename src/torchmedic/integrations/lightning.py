"""Lightning: a callback that watches `Trainer.fit`, and explains the exception that ends it.

    trainer = lightning.Trainer(callbacks=[TorchmedicCallback()])

With TORCHMEDIC_WATCH=1 in the environment, every Trainer has the callback, by an entry point that Lightning reads.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback
else:  # the same library under its other name; a Trainer takes only the callbacks of its own package
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from torchmedic.integrations.session import Session


class TorchmedicCallback(Callback):  # type: ignore[misc]
    """Watches the calls of `fit`. A healthy `fit` is left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._watching: Session | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self._watching is None:
            from torchmedic.integrations.session import session_of_tool

            self._watching = session_of_tool("lightning")
            if self._watching is not None:
                self._watching.begin()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._watching is not None:
            self._watching.failed(exception)
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.end()


def callbacks() -> list[TorchmedicCallback]:
    """The callbacks that every Trainer gets: none, unless the environment asks for it."""
    return [TorchmedicCallback()] if os.environ.get("TORCHMEDIC_WATCH") == "1" else []
