"""Hugging Face: a callback that watches `Trainer.train`, and explains the exception that ends it.

    Trainer(model, args, callbacks=[TorchmedicCallback()])

After `import torchmedic.integrations.transformers`, `TrainingArguments(report_to="torchmedic")` does the same.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from torchmedic.integrations.session import session_of_tool


class TorchmedicCallback(TrainerCallback):  # type: ignore[misc]
    """Has the `train` of its trainer watched.

    A trainer tells its callbacks nothing of an exception, and `on_train_end` is not called after one. So the first
    callback wraps `Trainer.train`; a trainer without the callback is not watched.
    """

    def __init__(self) -> None:
        super().__init__()
        if Trainer.train.__code__.co_filename != __file__:
            Trainer.train = _watched(Trainer.train)


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = any(isinstance(each, TorchmedicCallback) for each in trainer.callback_handler.callbacks)
        watching = session_of_tool("transformers") if wanted else None
        if watching is None:
            return original(trainer, *args, **kwargs)
        watching.begin()
        try:
            return original(trainer, *args, **kwargs)
        except BaseException as error:
            watching.failed(error)
            raise
        finally:
            watching.end()

    return train


INTEGRATION_TO_CALLBACK["torchmedic"] = TorchmedicCallback
