"""Functions under `functools.lru_cache` with a bound: what a replay put in would push something of the run's out.

The cache is a list in C that cannot be put back. So a replay gets what is in it, and is refused what is not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torchmedic.replay.isolation.outside_world import refuse
from torchmedic.replay.isolation.undo import PutBack
from torchmedic.source.objects.parts import cache_of
from torchmedic.source.user_code import is_user_file

_WRAPPER = type(functools.lru_cache(lambda: None))
_PLACE = "the function to call"


def bounded_cache(value: Any) -> Any:
    """The dict of a bounded cache; None if it is none."""
    is_bounded = type(value) is _WRAPPER and value.cache_parameters()["maxsize"]
    return cache_of(value) if is_bounded else None


def misses_refused(value: Any) -> Iterator[PutBack]:
    """Have a cached function ask before it computes, until that is put back."""
    function = getattr(value, "__wrapped__", None)
    if bounded_cache(value) is None or type(function) is not FunctionType or _is_of_library(function):
        return
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse("lru_cache")
        return original(*args, **kwargs)

    template = _through.__code__
    consts = tuple(call if each == _PLACE else each for each in template.co_consts)
    function.__code__ = template.replace(co_consts=consts, co_freevars=code.co_freevars)
    yield lambda: setattr(function, "__code__", code)


def _through(*args: Any, **kwargs: Any) -> Any:
    call: Any = "the function to call"
    return call(*args, **kwargs)


def _is_of_library(function: FunctionType) -> bool:
    """Whether a function belongs to a library: what it keeps does not depend on the step."""
    file = function.__code__.co_filename
    return not (file.startswith("<") or is_user_file(file))
