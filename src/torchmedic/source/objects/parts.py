"""What is inside an object: attributes, closures, frames, caches, hooks. Every walk over the user's objects asks here.

No code of the user runs: no property, no `__getattr__`, no `__iter__`, not even a `__class__` that is a property.
`containers.py` reads containers.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import PLAIN, locals_of

_CLOSED = frozenset(
    "torch numpy builtins threading multiprocessing concurrent asyncio _io io socket subprocess importlib logging "
    "typing abc enum re pathlib argparse datetime random torchmedic rich tqdm".split()
)
_OPEN = ("torch.utils.data", "asyncio.queues")
_INTERNAL_OF_MODULES = frozenset({"_parameters", "training", "_non_persistent_buffers_set"})
_DICTS = frozenset({dict, OrderedDict})
_DESCRIPTORS = (FunctionType, property, staticmethod, classmethod, functools.cached_property)
HOOK_TABLES_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MIN_REFERENTS = 2  # referents of a tensor that leads somewhere: its class, and something else


class Part(NamedTuple):
    """One thing that an object leads to.

    `name` is empty where it goes by the name of its owner. `code` is the function whose variable it is, `line` the
    first line of that function, 0 for what a closure has taken over. `hidden` is what a library's class keeps to
    itself: the user's code knows it by the name of the owner. `hooks` is the table that hooks are registered in.
    """

    name: str
    item: Any
    code: CodeType | None = None
    line: int = 0
    hidden: bool = False
    hooks: bool = False


def parts(value: Any, kind: type, *, libraries: bool = False) -> Iterator[Part]:
    """What an object leads to that is neither a container nor a tensor.

    Args:
        value: The object.
        kind: Its type.
        libraries: Whether to look also at what only libraries know: their objects, their functions, types of C.
    """
    reader = _readers.get(kind)
    if reader is None:
        found = (each for kinds, each in _READERS if issubclass(kind, kinds))
        reader = _readers[kind] = next(found, _of_object)
    return reader(value, kind, libraries)


def own_dict(value: Any, kind: type) -> dict[str, Any] | None:
    """The attributes that an object has itself; None where it has no dict for them."""
    found = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
    return found if type(found) is dict else None


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The `__slots__` of a class and its bases, each with the descriptor that reads and writes it."""
    for owner in kind.__mro__:
        if "__slots__" in owner.__dict__:
            for name, member in owner.__dict__.items():
                if type(member) is MemberDescriptorType and not name.startswith("__"):
                    yield name, member


def attributes(value: Any, kind: type) -> list[tuple[str, Any]]:
    """The attributes of an object, from its dict and its `__slots__`."""
    found = list((own_dict(value, kind) or {}).items())
    for name, member in members_of(kind):
        try:
            found.append((name, member.__get__(value, kind)))
        except AttributeError:
            continue  # not set yet
    return found


def cache_of(function: Any) -> Any:
    """The dict behind `functools.cache`."""
    own = function.__dict__
    return next((each for each in gc.get_referents(function) if type(each) is dict and each is not own), None)


def attributes_of_tensor(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """What the user has hung on a tensor; one that has nothing is not given a dict by the question."""
    has_any = any(type(each) is dict for each in gc.get_referents(tensor))
    return list(tensor.__dict__.items()) if has_any else []


def parts_of_tensor(tensor: torch.Tensor, kind: type) -> Iterator[Part]:
    """What the user has hung on a tensor, and its hooks."""
    if len(gc.get_referents(tensor)) < _MIN_REFERENTS:
        return
    yield from (Part(name, item) for name, item in attributes_of_tensor(tensor))
    for name in HOOK_TABLES_OF_TENSORS if kind in (torch.Tensor, torch.nn.Parameter) else ():
        table = getattr(tensor, name, None)
        if table:
            yield Part(name, table, hooks=True)


def is_users(kind: type) -> bool:
    """Whether a class is the user's own."""
    return is_user_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<>")


def classes_of(owner: type | None) -> tuple[str, ...]:
    """The names of a class and its bases; none of a metaclass: what a class has, its children have too."""
    return tuple(each.__name__ for each in owner.__mro__) if owner is not None and not issubclass(owner, type) else ()


def module_of(kind: type) -> str:
    return str(getattr(kind, "__module__", ""))


# One reader for each kind of object


def _of_object(value: Any, kind: type, libraries: bool) -> Iterator[Part]:
    name = module_of(kind)
    is_open = name.partition(".")[0] not in _CLOSED or name.startswith(_OPEN) or issubclass(kind, logging.Handler)
    if not (is_open or libraries):
        return
    own = is_users(kind)
    if issubclass(kind, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        yield Part("data", value.__dict__.get("data"), hidden=True)
    else:
        found = attributes(value, kind)
        for name, item in found:
            if type(item) not in PLAIN and type(name) is str:
                yield Part(name, item, hidden=not own)
        if libraries and not found and own_dict(value, kind) is None:  # a type of C: what it holds has no name
            yield from (Part("", item) for item in gc.get_referents(value))
    if own and not libraries:
        yield Part("", kind)


def _of_module(module: torch.nn.Module, kind: type, libraries: bool) -> Iterator[Part]:
    for name, item in list(module.__dict__.items()):
        sort = type(item)
        if sort in PLAIN or name in _INTERNAL_OF_MODULES or (sort in _DICTS and not item):
            continue
        if name in ("_modules", "_buffers"):
            yield from (Part(inner, each) for inner, each in list(item.items()))
        elif "_hooks" in name and isinstance(item, dict):
            yield Part(name, item, hooks=True)
            yield from (Part("", hook) for hook in list(item.values()) if not libraries)
        elif libraries or not name.startswith("_") or not module_of(kind).startswith("torch."):
            yield Part(name, item)
    for name, parameter in list(module.__dict__.get("_parameters", {}).items()):
        if parameter is not None and (libraries or len(gc.get_referents(parameter)) >= _MIN_REFERENTS):
            yield Part(name, parameter)
    if not libraries and is_users(kind):
        yield Part("", kind)


def _of_optimizer(optimizer: torch.optim.Optimizer, kind: type, libraries: bool) -> Iterator[Part]:
    for name, item in list(optimizer.__dict__.items()):
        if name.endswith("_hooks") and isinstance(item, dict):
            if item:
                yield Part(name, item, hooks=True)
        elif libraries or name in ("param_groups", "state"):
            yield Part(name, item, hidden=True)


def _of_class(owner: type, kind: type, libraries: bool) -> Iterator[Part]:
    if is_users(owner):
        for name, item in list(vars(owner).items()):
            if not name.startswith("__") and not isinstance(item, _DESCRIPTORS):
                yield Part(name, item)
            elif isinstance(item, FunctionType | staticmethod | classmethod):
                yield Part("", getattr(item, "__func__", item))


def _of_function(function: FunctionType, kind: type, libraries: bool) -> Iterator[Part]:
    code = function.__code__
    if not libraries and not is_user_file(code.co_filename) and function.__closure__ is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Part(name, cell.cell_contents, code)
        except ValueError:
            continue  # not bound yet
    arguments = code.co_varnames[: code.co_argcount]
    defaults = [*zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False)]
    for name, default in [*defaults, *(function.__kwdefaults__ or {}).items()]:
        yield Part(name, default, code, code.co_firstlineno)
    for name, item in list(function.__dict__.items()):
        yield Part("" if name == "__wrapped__" else name, item)


def _of_method(method: MethodType, kind: type, libraries: bool) -> Iterator[Part]:
    yield Part("", method.__self__)
    yield Part("", method.__func__)


def _of_partial(partial: functools.partial[Any], kind: type, libraries: bool) -> Iterator[Part]:
    yield from (Part("", item) for item in (partial.func, *partial.args, *partial.keywords.values()))


def _of_exception(error: BaseException, kind: type, libraries: bool) -> Iterator[Part]:
    """An exception that was caught and kept holds the frames that it came through."""
    traceback = error.__traceback__
    while traceback is not None:
        if libraries or is_user_file(traceback.tb_frame.f_code.co_filename):
            yield from (Part(name, item) for name, item in locals_of(traceback.tb_frame))
        traceback = traceback.tb_next
    yield from (Part("args", item) for item in error.args)
    yield Part("__context__", error.__context__)
    yield Part("__cause__", error.__cause__)
    yield from (Part(name, item) for name, item in attributes(error, kind))


def _of_suspended(value: Any, kind: type, libraries: bool) -> Iterator[Part]:
    """The variables of a generator or coroutine that waits to go on."""
    prefix = "gi" if kind is GeneratorType else "cr" if kind is CoroutineType else "ag"
    frame: FrameType | None = getattr(value, f"{prefix}_frame")
    if frame is not None and is_user_file(frame.f_code.co_filename):
        code = frame.f_code
        yield from (Part(name, item, code, code.co_firstlineno) for name, item in locals_of(frame))


def _of_cached_function(function: Any, kind: type, libraries: bool) -> Iterator[Part]:
    yield Part("", function.__wrapped__)


def _of_context_variable(variable: ContextVar[Any], kind: type, libraries: bool) -> Iterator[Part]:
    yield Part("get()", variable.get(None), hidden=True)


def _of_thread_local(value: Any, kind: type, libraries: bool) -> Iterator[Part]:
    if kind is threading.local or libraries:  # a class of the user may be made anew by the question
        yield from (Part(name, item) for name, item in list(vars(value).items()))


def _of_logger(logger: logging.Logger, kind: type, libraries: bool) -> Iterator[Part]:
    yield from (Part("", handler) for handler in list(logger.handlers))


def _of_named_tuple(value: Any, kind: type, libraries: bool) -> Iterator[Part]:
    names = getattr(kind, "_fields", ())
    yield from (Part(name, item) for name, item in zip(names, tuple.__iter__(value), strict=False))


def _of_nothing(value: Any, kind: type, libraries: bool) -> Iterator[Part]:
    return iter(())


_Reader = Callable[[Any, Any, bool], Iterator[Part]]
_READERS: tuple[tuple[type | tuple[type, ...], _Reader], ...] = (
    (torch.nn.Module, _of_module),
    (FunctionType, _of_function),
    (MethodType, _of_method),
    (functools.partial, _of_partial),
    (BaseException, _of_exception),
    ((GeneratorType, CoroutineType, AsyncGeneratorType), _of_suspended),
    (type, _of_class),
    (functools._lru_cache_wrapper, _of_cached_function),
    (ContextVar, _of_context_variable),
    (torch.optim.Optimizer, _of_optimizer),
    (threading.local, _of_thread_local),
    (logging.Logger, _of_logger),
    (tuple, _of_named_tuple),
    ((ModuleType, FrameType, CodeType), _of_nothing),
)
_readers: WeakTable[_Reader] = WeakTable()  # the reader of a kind that was met
