"""Settings of the process and of torch that a step may change: environment, folder, threads, flags."""

from __future__ import annotations

import gc
import os
import sys

import torch

from torchmedic.replay.isolation.undo import PutBack


def settings_now() -> list[PutBack]:
    """How to put back what is set now."""
    environment, folder, path = dict(os.environ), _working_folder(), list(sys.path)
    collects = gc.isenabled()
    matmul = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("benchmark", "deterministic", "enabled")}

    def put_back() -> None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if folder is not None and _working_folder() != folder:
            os.chdir(folder)
        if sys.path != path:
            sys.path[:] = path
        if gc.isenabled() != collects:
            (gc.enable if collects else gc.disable)()

    def put_back_torch() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)

    return [put_back, put_back_torch]


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None
