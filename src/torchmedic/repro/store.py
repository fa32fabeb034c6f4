"""Stores the values of a recipe's inputs in a safetensors file, which contains no code, unlike a pickle."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from torchmedic.errors import UnreadableRun
from torchmedic.repro import allowed
from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Input, Recipe
from torchmedic.runfolder import reading

_COMPLEX = {"complex64": torch.float32, "complex128": torch.float64, "complex32": torch.float16}


def encoded(program: Program) -> bytes | None:
    """The bytes of a safetensors file; None if every input is one repeated value."""
    tensors = {
        given.name: _storable(program.tensors[given.name].contiguous())
        for given in program.inputs
        if given.fill is None
    }
    return save(tensors) if tensors else None


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()).contiguous() if tensor.is_complex() else tensor


def read(recipe: Recipe, path: Path) -> Program:
    """Read the values of a recipe.

    Raises:
        UnreadableRun: The file is missing, damaged, or does not fit the recipe, or the recipe is not allowed.
    """
    try:
        allowed.check(recipe)
    except ValueError as error:
        raise UnreadableRun(f"cannot read {path.with_suffix('.json')}: it contains {error}") from None
    stored: dict[str, torch.Tensor] = {}
    if any(given.fill is None for given in recipe.inputs):
        try:
            stored = load(reading.read(path))
        except OSError as error:
            raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
        except (SafetensorError, ValueError, KeyError, RuntimeError, struct.error, json.JSONDecodeError) as error:
            raise UnreadableRun(f"cannot read {path}: it is damaged ({error})") from None
    tensors = {}
    for given in recipe.inputs:
        tensor = _values(given, stored)
        if tensor is None:
            raise UnreadableRun(f"cannot read {path}: `{given.name}` is not in it as it should be")
        tensors[given.name] = tensor
    return Program(recipe, tensors)


def _values(given: Input, stored: dict[str, torch.Tensor]) -> torch.Tensor | None:
    dtype = getattr(torch, given.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    if given.fill is not None:
        try:
            return torch.full(given.shape, given.fill, dtype=dtype)
        except RuntimeError:  # the type cannot hold the value
            return None
    tensor = stored.get(given.name)
    if tensor is not None and given.dtype in _COMPLEX and tensor.dim() and tensor.shape[-1] == 2:
        tensor = torch.view_as_complex(tensor)
    return tensor if tensor is not None and tensor.dtype is dtype and tuple(tensor.shape) == given.shape else None
