"""The world outside the process, which a replay must not touch: files, other processes and threads, the network.

What only tells or keeps something (a write, a removed file, an item put into a queue) is left out, and the step goes
on. What the step needs an answer to (a process, a connection, an item from a queue) is refused. An audit hook refuses
the rest. Other threads of the user's go on undisturbed.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from typing import Any

from torchmedic.observe.ranks.contents import METHODS
from torchmedic.replay.isolation.open_files import databases_locked, open_files_muted, opened
from torchmedic.replay.isolation.reaching_calls import EVENTS, LEFT_OUT, REFUSED

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_SLEEP_SECONDS = 0.01


Answer = Callable[[str, int, tuple[Any, ...]], Any]  # of a method, the size of its group, and what was passed


class Refused(OSError):
    """What a replay asked for would reach outside of it. Code that can do without a network or a disk goes on."""


class Seal:
    """One replay, as seen from the calls that must not get out of it."""

    def __init__(self) -> None:
        self.refused = ""  # what was asked for last
        self.count = 0
        self.exchanges = 0  # with other ranks, that were refused
        self.unfilled: list[Any] = []  # tensors that were to get a message in them
        self.answer: Answer = lambda method, size, args: None  # what stands in for such an exchange
        me = threading.get_ident()
        self._others = {thread for thread in sys._current_frames() if thread != me}

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread runs the replay: the one that began it, or one of autograd's."""
        return threading.get_ident() not in self._others

    def refuse(self, what: str) -> None:
        """Raise `Refused`, and remember it."""
        self.refused = what
        self.count += 1
        raise Refused(f"a replay must not do `{what}` again")


_seal: Seal | None = None
_has_hook = False


def refuse(what: str) -> None:
    """Raise `Refused` where this thread is in a replay: a replay must not do this again."""
    if _seal is not None and _seal.is_ours:
        _seal.refuse(what)


def refuse_exchange() -> None:
    """Refuse what other ranks would have to take part in: they are not in this replay."""
    if _seal is not None:
        _seal.exchanges += 1
        _seal.refuse("a collective of torch.distributed")


@contextlib.contextmanager
def exchanges_answered(answer: Answer) -> Iterator[None]:
    """Answer exchanges with other ranks; those without an answer (None) are refused. Only where it is sealed."""
    seal = _seal
    assert seal is not None
    before, seal.answer = seal.answer, answer
    try:
        yield
    finally:
        seal.answer = before


def exchanges() -> int:
    """How many exchanges with other ranks the replay that is under way has been refused."""
    return _seal.exchanges if _seal is not None else 0


def unfilled() -> list[Any]:
    """The tensors that were to get a message of another rank, since the last question."""
    if _seal is None:
        return []
    found, _seal.unfilled = _seal.unfilled, []
    return found


def refusals() -> int:
    """How often the replay that is under way has been refused something."""
    return _seal.count if _seal is not None else 0


def is_sealed() -> bool:
    """Whether a replay is under way."""
    return _seal is not None


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Nothing that is run here reaches outside of the process, or another thread."""
    global _seal, _has_hook
    if _seal is not None:
        yield
        return
    if not _has_hook:
        _has_hook = True  # a hook cannot be taken away again; it sleeps where nothing is sealed
        sys.addaudithook(_audit)
    seal = Seal()
    with contextlib.ExitStack() as stack:
        for table, make in ((LEFT_OUT, _left_out), (REFUSED, _refusing)):
            for owner, names in _owners(table):
                for name in names:
                    if callable(getattr(owner, name, None)):
                        _patch(stack, owner, name, make(seal, getattr(owner, name), name))
        group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
        for name in METHODS if group is not None else ():
            if name in vars(group):
                _patch(stack, group, name, _exchanging(seal, getattr(group, name), name))
        for module in (builtins, io, sys.modules["_io"]):
            _patch(stack, module, "open", _opening(seal, module.open))
        _patch(stack, os, "open", _opening_descriptor(seal, os.open))
        _patch(stack, os, "write", _ours(seal, os.write, lambda descriptor, data: len(data)))
        _patch(stack, time, "sleep", _ours(seal, time.sleep, _napping(time.sleep)))
        stack.enter_context(databases_locked(seal))
        stack.enter_context(open_files_muted(seal))
        _patch(stack, sys, "stdin", io.StringIO())
        _seal = seal
        try:
            yield
        finally:
            _seal = None


@contextlib.contextmanager
def reading_refused(iterators: Container[int]) -> Iterator[None]:
    """Refuse to take the next item of these, by identity: it would be missing afterwards. Only where it is sealed."""
    seal, original = _seal, builtins.next
    assert seal is not None

    def instead(iterator: Any, *default: Any) -> Any:
        if id(iterator) in iterators:
            seal.refuse("next")
        return original(iterator, *default)

    with contextlib.ExitStack() as stack:
        _patch(stack, builtins, "next", _ours(seal, original, instead))
        yield


def _owners(table: dict[str, str]) -> Iterator[tuple[Any, list[str]]]:
    for path, names in table.items():
        owner = sys.modules.get(path)
        if owner is None:
            module, _, kind = path.rpartition(".")
            owner = getattr(sys.modules.get(module), kind, None)
        if owner is not None:
            yield owner, names.split()


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    had = name in vars(owner)
    before = vars(owner).get(name)

    def put_back() -> None:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    with contextlib.suppress(TypeError, AttributeError):  # a type of C's
        setattr(owner, name, value)
        stack.callback(put_back)


def _ours(seal: Seal, original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(*args, **kwargs) if seal.is_ours else original(*args, **kwargs)

    return call


def _left_out(seal: Seal, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    answer = {"umask": 0o022, "alarm": 0, "setitimer": (0.0, 0.0), "acquire": True, "__enter__": True}.get(name)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return args[0] if name == "register" and args else answer  # `@atexit.register` leaves a function behind

    return _ours(seal, original, nothing)


def _refusing(seal: Seal, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    return _ours(seal, original, lambda *args, **kwargs: seal.refuse(name))


def _exchanging(seal: Seal, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def instead(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() < 2:
            return original(group, *args, **kwargs)
        answer = seal.answer(name, group.size(), args)
        if answer is None:
            seal.unfilled += args[0] if name in ("recv", "recv_anysource") else ()
            refuse_exchange()
        return answer

    return _ours(seal, original, instead)


def _opening(seal: Seal, original: Callable[..., Any]) -> Callable[..., Any]:
    def instead(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, str) or not set(mode) & set("wax+"):
            return original(file, mode, *args, **kwargs)
        if "r" in mode:
            seal.refuse("open")  # what stands there is read as well
        kept = {name: value for name, value in kwargs.items() if name not in ("opener", "closefd")}
        if kwargs.get("opener") is not None:  # it may say how the file is called
            os.close(kwargs["opener"](file, os.O_WRONLY | os.O_CREAT))
        return opened(file, mode, *args[:4], **kept)

    return _ours(seal, original, instead)


def _opening_descriptor(seal: Seal, original: Callable[..., Any]) -> Callable[..., Any]:
    def instead(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & _WRITING:
            return original(os.devnull, flags & (os.O_WRONLY | os.O_RDWR | os.O_CLOEXEC))
        return original(path, flags, *args, **kwargs)

    return _ours(seal, original, instead)


def _napping(original: Callable[[float], None]) -> Callable[[float], None]:
    return lambda seconds: original(min(seconds, _MAX_SLEEP_SECONDS))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    seal = _seal
    if seal is None or not (event in EVENTS or event == "open") or not seal.is_ours:
        return
    if event == "open":
        flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        if not flags & _WRITING or args[0] == os.devnull or isinstance(args[0], int):
            return
    seal.refuse(event)
