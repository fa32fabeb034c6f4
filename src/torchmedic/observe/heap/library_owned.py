"""Objects of the user's classes whose methods a library has written and runs: a subclass of its trainer, say.

`MyTrainer(...).train()` stores the trainer in no variable; only the library's frames know it, as `self`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchmedic.source.objects.parts import is_users
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of


def owners_of_methods(frame: FrameType | None) -> Iterator[Any]:
    """From the innermost frame outwards."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self" and not is_user_file(code.co_filename):
            owner = next((value for name, value in locals_of(frame) if name == "self"), None)
            if is_users(type(owner)):
                yield owner
        frame = frame.f_back
