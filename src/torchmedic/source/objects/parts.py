"""What an object leads to, and under which name: attributes, closures, frames, caches, hooks.

For the walk over the user's variables. Nothing of the user's is called, and what only libraries know is left alone.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import PLAIN, locals_of

_CLOSED = frozenset(
    "torch numpy builtins threading multiprocessing concurrent asyncio _io io socket subprocess importlib logging "
    "typing abc enum re pathlib argparse datetime random torchmedic rich tqdm".split()
)
_OPEN = ("torch.utils.data", "asyncio.queues")
_OWN_OF_MODULES = frozenset({"_parameters", "training", "_non_persistent_buffers_set"})
_DICTS = frozenset({dict, OrderedDict})
_DESCRIPTORS = (FunctionType, property, staticmethod, classmethod, functools.cached_property)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TWO = 2  # things that a tensor refers to: its class, and something else
_LINKS = ("__context__", "__cause__")  # from one exception to the next


class Part(NamedTuple):
    """One thing that an object leads to.

    `name` is empty where it goes by the name of its owner. `file` and `line` are those of a function whose variable it
    is. `hidden` is what a library's class keeps to itself: the user's code knows it by the name of the owner. `hooks`
    is the table that hooks are registered in.
    """

    name: str
    item: Any
    file: str = ""
    line: int = 0
    hidden: bool = False
    hooks: bool = False


def parts(value: Any, kind: type) -> Iterator[Part]:
    """What an object that is neither a container nor a tensor leads to."""
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value, kind)
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield Part("", value.__self__)
        yield Part("", value.__func__)
    elif isinstance(value, functools.partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield Part("", item)
    elif isinstance(value, BaseException):
        yield from _of_exception(value)
    elif isinstance(value, GeneratorType | CoroutineType | AsyncGeneratorType):
        frame = getattr(value, "gi_frame", None) or getattr(value, "cr_frame", None) or getattr(value, "ag_frame", None)
        if frame is not None and is_user_file(frame.f_code.co_filename):
            yield from _of_frame(frame)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif kind.__name__ == "_lru_cache_wrapper":
        yield Part("", value.__wrapped__)
    elif isinstance(value, ContextVar):
        yield Part("get()", value.get(None), hidden=True)
    elif isinstance(value, torch.optim.Optimizer):
        for name in ("param_groups", "state"):
            yield Part(name, value.__dict__.get(name), hidden=True)
        yield from _of_hook_tables(value.__dict__)
    elif kind is threading.local:  # one of the user's own may be made anew by the question
        yield from (Part(name, item) for name, item in list(vars(value).items()))
    elif isinstance(value, logging.Logger):
        yield from (Part("", handler) for handler in list(value.handlers))
    elif isinstance(value, logging.Handler):
        yield from _attributes(value, kind)
    elif isinstance(value, tuple):  # with names
        yield from (
            Part(name, item) for name, item in zip(getattr(kind, "_fields", ()), tuple.__iter__(value), strict=False)
        )
    elif not isinstance(value, ModuleType) and _is_open(kind):
        yield from _attributes(value, kind)
        if is_users(kind):
            yield Part("", kind)


def cache_of(function: Any) -> Any:
    """The dict behind `functools.cache`."""
    own = function.__dict__
    return next((each for each in gc.get_referents(function) if type(each) is dict and each is not own), None)


def attributes_of(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """What the user has hung on a tensor; one that has nothing is not given a dict by the question."""
    has_any = any(type(each) is dict for each in gc.get_referents(tensor))
    return list(tensor.__dict__.items()) if has_any else []


def parts_of(tensor: torch.Tensor, kind: type) -> Iterator[Part]:
    """What the user has hung on a tensor, and its hooks."""
    if len(gc.get_referents(tensor)) < _TWO:
        return  # there is only its class
    yield from (Part(name, item) for name, item in attributes_of(tensor))
    for name in _OF_TENSORS if kind in (torch.Tensor, torch.nn.Parameter) else ():
        table = getattr(tensor, name, None)
        if table:
            yield Part(name, table, hooks=True)


def is_users(kind: type) -> bool:
    """Whether a class is the user's own."""
    return is_user_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<>")


def classes_of(owner: type | None) -> tuple[str, ...]:
    """The names of a class and those it is made from; none of a metaclass: what a class has, its children have too."""
    return tuple(each.__name__ for each in owner.__mro__) if owner is not None and not issubclass(owner, type) else ()


def module_of(kind: type) -> str:
    return str(getattr(kind, "__module__", ""))


def slots_of(kind: type) -> list[str]:
    """The attributes that a class itself has a place for."""
    slots = kind.__dict__.get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _is_open(kind: type) -> bool:
    name = module_of(kind)
    return name.partition(".")[0] not in _CLOSED or name.startswith(_OPEN)


def _attributes(value: Any, kind: type) -> Iterator[Part]:
    hidden = not is_users(kind)
    if issubclass(kind, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        yield Part("data", value.__dict__.get("data"), hidden=True)
        return
    found = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
    if type(found) is dict:
        for name, item in list(found.items()):
            if type(item) not in PLAIN and isinstance(name, str):
                yield Part(name, item, hidden=hidden)
    for owner in kind.__mro__:
        for name in slots_of(owner):
            yield Part(name, getattr(value, name, None), hidden=hidden)


def _of_module(module: torch.nn.Module, kind: type) -> Iterator[Part]:
    for name, item in list(module.__dict__.items()):
        sort = type(item)
        if sort in PLAIN or name in _OWN_OF_MODULES or (sort in _DICTS and not item):
            continue
        if name in ("_modules", "_buffers"):
            yield from (Part(inner, each) for inner, each in list(item.items()))
        elif "_hooks" in name and isinstance(item, dict):
            yield Part(name, item, hooks=True)
            yield from (Part("", hook) for hook in list(item.values()))
        elif not name.startswith("_") or not module_of(kind).startswith("torch."):
            yield Part(name, item)
    for name, parameter in module._parameters.items():
        if parameter is not None and len(gc.get_referents(parameter)) >= _TWO:
            yield Part(name, parameter)
    if is_users(kind):
        yield Part("", kind)


def _of_hook_tables(attributes: dict[str, Any]) -> Iterator[Part]:
    for name, item in list(attributes.items()):
        if name.endswith("_hooks") and item and isinstance(item, dict):
            yield Part(name, item, hooks=True)


def _of_class(owner: type) -> Iterator[Part]:
    if is_users(owner):
        for name, item in list(vars(owner).items()):
            if not name.startswith("__") and not isinstance(item, _DESCRIPTORS):
                yield Part(name, item)
            elif isinstance(item, FunctionType | staticmethod | classmethod):
                yield Part("", getattr(item, "__func__", item))


def _of_function(function: FunctionType) -> Iterator[Part]:
    code = function.__code__
    if not is_user_file(code.co_filename) and function.__closure__ is None:
        return
    file, line = code.co_filename, code.co_firstlineno
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Part(name, cell.cell_contents, file)
        except ValueError:
            continue  # not bound yet
    arguments = code.co_varnames[: code.co_argcount]
    for name, default in zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False):
        yield Part(name, default, file, line)
    for name, default in (function.__kwdefaults__ or {}).items():
        yield Part(name, default, file, line)
    for name, item in list(function.__dict__.items()):
        yield Part("" if name == "__wrapped__" else name, item)


def _of_exception(error: BaseException) -> Iterator[Part]:
    traceback = error.__traceback__
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            yield from (Part(name, item) for name, item in locals_of(traceback.tb_frame))
        traceback = traceback.tb_next
    yield from (Part(name, getattr(error, name)) for name in _LINKS)
    yield from (Part(name, item) for name, item in list(error.__dict__.items()))


def _of_frame(frame: FrameType) -> Iterator[Part]:
    code = frame.f_code
    for name, item in locals_of(frame):
        yield Part(name, item, code.co_filename, code.co_firstlineno)
