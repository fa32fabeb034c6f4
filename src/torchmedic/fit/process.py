"""Asks a new process for a prediction, so that the process of the command line never imports torch."""

from __future__ import annotations

import os
import subprocess

import msgspec

from torchmedic import _isolated as isolated
from torchmedic.errors import TorchmedicError
from torchmedic.records.fit import Answer, Prediction, Request


def ask(request: Request) -> Prediction:
    """The prediction for a script.

    Raises:
        TorchmedicError: There is none; the text says why.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHMEDIC_")}
    done = subprocess.run(
        isolated.module_command("torchmedic.fit.worker"),
        check=False,
        input=msgspec.json.encode(request),
        capture_output=True,
        env=environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TorchmedicError(f"the prediction failed: {last}") from None
    if answer.prediction is None:
        raise TorchmedicError(answer.error)
    return answer.prediction
