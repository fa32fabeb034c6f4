"""A batch that a replay may ask for, kept so that nothing of the user's lives longer.

The user's own tensors and objects are referred to weakly. Beside each tensor an alias of it is kept, which shares its
memory: a step that has overwritten the name of its input can still be replayed. Too large a batch has no aliases.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchmedic.contained import pass_signals_on
from torchmedic.observe.step.tensors import PLAIN, is_mapping, tensors_in

_MAX_ALIASED_BYTES = 64 << 20
_MAX_ITEMS = 256
_MAX_DEPTH = 4
_STRIDED = torch.strided
_VALUES = frozenset({type(None), int, float, bool, str, bytes})
_SEQUENCES = (list, tuple)
_GONE = object()
_new_tuple: Any = tuple.__new__  # the constructor of a named tuple takes five times as long


class _Part(NamedTuple):
    """A tensor or an object: the user's own, and what stands for it when that is gone."""

    own: weakref.ref[Any]
    substitute: Any


class _Items(NamedTuple):
    """A list, a tuple or a dict, with its parts in order."""

    kind: type
    names: tuple[Any, ...] | None  # of a dict
    parts: list[Any]


class KeptBatch:
    """One batch, as the loader yielded it."""

    def __init__(
        self, batch: Any, tensors: Sequence[torch.Tensor], weak: list[weakref.ref[torch.Tensor]] | None = None
    ) -> None:
        """Keep a batch, in which these are the tensors; `weak` of a list or tuple of nothing but plain tensors."""
        nbytes = 0
        aliased = True
        on_host = True
        for tensor in tensors:
            if type(tensor) not in PLAIN:
                on_host = aliased = False  # to ask a subclass anything may run code of the user's
                continue
            if tensor.layout is _STRIDED:
                nbytes += tensor.nbytes
            on_host = on_host and tensor.is_cpu
        self.nbytes = nbytes
        self.count = len(tensors)
        self.on_host = on_host  # all of it
        if weak is None or nbytes > _MAX_ALIASED_BYTES:
            self._tree = _kept(batch, aliased and nbytes <= _MAX_ALIASED_BYTES, _MAX_DEPTH)
        else:  # what `_kept` does, without a call for each tensor
            parts = [_new_tuple(_Part, (own, tensor.detach())) for own, tensor in zip(weak, tensors, strict=True)]
            self._tree = _new_tuple(_Items, (type(batch), None, parts))

    @property
    def whole(self) -> Any:
        """The batch, with aliases for tensors that are gone; None where something is gone for good."""
        whole = _given_back(self._tree)
        return None if whole is _GONE else whole

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are left, in order."""
        return tensors_in(_given_back(self._tree, partly=True))


def _kept(value: Any, aliased: bool, depth: int) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return _new_tuple(_Part, (weakref.ref(value), value.detach() if aliased else _GONE))
    if kind in _VALUES:
        return value
    if isinstance(value, torch.Tensor):
        return _Part(weakref.ref(value), _GONE)
    if isinstance(value, _SEQUENCES) and depth and len(value) <= _MAX_ITEMS:
        return _new_tuple(_Items, (kind, None, [_kept(item, aliased, depth - 1) for item in value]))
    if kind is dict and depth and len(value) <= _MAX_ITEMS:
        return _Items(kind, tuple(value), [_kept(item, aliased, depth - 1) for item in value.values()])
    substitute: Any = _GONE
    if depth and aliased and is_mapping(value):
        # A library's mapping, as of a tokenizer: a dict of the same items has to do.
        try:
            substitute = _kept(dict(value.items()), aliased, depth - 1)
        except Exception as error:
            pass_signals_on(error)
    try:
        return _Part(weakref.ref(value), substitute)
    except TypeError:
        return _GONE


def _given_back(kept: Any, *, partly: bool = False) -> Any:
    if isinstance(kept, _Part):
        own = kept.own()
        return own if own is not None else _given_back(kept.substitute, partly=partly)
    if not isinstance(kept, _Items):
        return kept
    parts = [_given_back(part, partly=partly) for part in kept.parts]
    if partly:
        return [part for part in parts if part is not _GONE]
    if any(part is _GONE for part in parts):
        return _GONE
    if kept.names is not None:
        return dict(zip(kept.names, parts, strict=True))
    make = getattr(kept.kind, "_make", kept.kind)  # a named tuple takes its items one by one
    try:
        return make(parts)
    except Exception as error:
        pass_signals_on(error)
        return tuple(parts)
