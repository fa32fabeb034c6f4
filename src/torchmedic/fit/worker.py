"""The process that predicts: takes a request from stdin, answers with a prediction on stdout."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import msgspec

from torchmedic.records.fit import Answer, Request


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    output = os.dup(1)
    os.dup2(2, 1)  # nothing but the answer goes to stdout
    answer = _answered(request)
    with os.fdopen(output, "wb") as stream:
        stream.write(msgspec.json.encode(answer))


def _answered(request: Request) -> Answer:
    try:
        import torch  # noqa: F401
    except ImportError:
        return Answer(error="torch is not installed in this environment")
    warnings.simplefilter("ignore")
    from torchmedic.errors import TorchmedicError
    from torchmedic.fit.predictor import predicted

    os.chdir(request.folder)
    try:
        return Answer(prediction=predicted(request, Path(request.script)))
    except TorchmedicError as error:
        return Answer(error=str(error))


if __name__ == "__main__":
    main()
