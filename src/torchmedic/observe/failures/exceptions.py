"""How Python code ends with an exception, and the moment to look at it: its frames are still alive, its text is out.

The main thread ends in `sys.excepthook`, other threads in `threading.excepthook`, children of `multiprocessing` in a
handler of their own. The hook that was there before is always called first, so the user's traceback comes first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import multiprocessing.process
import multiprocessing.queues
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from torchmedic.contained import contained, is_short, text_of
from torchmedic.observe.failures import hostile_exceptions
from torchmedic.observe.failures.hostile_exceptions import examinable, traceback_of
from torchmedic.observe.failures.shown_tracebacks import without_our_frames
from torchmedic.observe.memory import headroom
from torchmedic.source.user_code import is_user_file

Handler = Callable[[BaseException], None]


_seen: BaseException | None = None  # of the main thread, which ends with it
_leaving: Exception | None = None  # behind the `SystemExit` that is under way
_leaving_lives: weakref.ref[_Alive] | None = None
_lost = False  # something that was put into a queue, and that has been told


def install(handler: Handler, child_ends: Callable[[], None], gives_up: Callable[[FrameType, bool], None]) -> None:
    _chain_sys_excepthook(handler)
    _chain_threading_excepthook(handler)
    _watch_multiprocessing(handler, child_ends)
    _watch_torch_spawn(handler)
    _watch_queues(handler)
    _watch_sys_exit(gives_up)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context in which torch's SIGCHLD handler does not report dead workers: it raises in the middle of any code."""
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGCHLD)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def look_back(handler: Handler) -> None:
    """At exit: an exception whose hook we never saw.

    Either the user put another `sys.excepthook` in its place, or caught it, and gave up from there by `sys.exit(1)`.
    """
    error = getattr(sys, "last_value", None) or _leaving
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        without_our_frames(error)
        handle(error, handler)


def training_goes_on() -> None:
    """The script has caught the `SystemExit` and trains on: forget the exception behind it."""
    global _leaving
    _leaving = None


def _watch_sys_exit(gives_up: Callable[[FrameType, bool], None]) -> None:
    """`except Exception: log it; sys.exit(1)` is as much an end by an exception as not to catch it.

    Without an exception it may still be the script's way to say that it has seen a number that is not finite.
    """
    original = sys.exit

    @functools.wraps(original)
    def exit(status: Any = None, /) -> Any:
        global _leaving, _leaving_lives
        error = sys.exception()
        if error is not None and _is_within(error, sys._getframe(1).f_code.co_filename):
            error = None
        in_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, Exception) and status not in (None, 0) and in_main:
            _leaving = error
            alive = _Alive()  # as long as the traceback of the SystemExit, which holds this frame
            _leaving_lives = weakref.ref(alive, _stays)
        elif error is None:
            gives_up(sys._getframe(1), status not in (None, 0))
        original(status)

    sys.exit = exit


def _is_within(error: BaseException, file: str) -> bool:
    """Whether an exception never left this file of a library: the way in which argparse finds a bad option."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(traceback_of(error))}
    return files == {file} and not is_user_file(file)


class _Alive:
    """Lives as long as the frame that holds it."""

    __slots__ = ("__weakref__",)


def _stays(_: object) -> None:
    """The `SystemExit` is gone. If the script still runs, it has caught it, and stays."""
    global _leaving
    main = vars(sys.modules["__main__"])
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_globals is main:
            _leaving = None
            return
        frame = frame.f_back


def look_at(error: BaseException, handler: Handler) -> None:
    """Have an exception explained, unless it is a way to end that is no failure."""
    launcher = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    asked = getattr(launcher, "SignalException", KeyboardInterrupt)  # by a signal, which the launcher of a job obeys
    if issubclass(type(error), KeyboardInterrupt | SystemExit | GeneratorExit | asked):
        return
    error = contained("observe.endings")(examinable)(error) or error
    hostile_exceptions.mend(error)
    handler(error)


def handle(error: BaseException, handler: Handler) -> None:
    """Have an exception explained that ends the work of a thread. What ends the main thread is explained once."""
    global _seen
    if error is _seen:
        return
    if threading.current_thread() is threading.main_thread():
        _seen = error
        look_at(error, handler)
        return
    if issubclass(type(error), SystemExit):
        return  # nobody has looked at its frames
    look_at(error, handler)
    # Whoever is connected to what the frames of a thread held waits until that is gone: nothing of ours may keep it.
    gc.collect()


def _chain_sys_excepthook(handler: Handler) -> None:
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        with undisturbed():
            without_our_frames(error)
            shown = traceback_of(error) if tb is not None else None
            try:
                if previous is sys.__excepthook__ and _is_of_console(shown):
                    # The console would have shown it so itself, were there no hook of ours.
                    sys.stderr.write("".join(traceback.format_exception(kind, error, shown.tb_next)))  # type: ignore[union-attr]
                else:
                    previous(kind, error, shown)
            except Exception as failure:  # in a hook of the user's
                _show_failed_hook(failure, error, shown)
            finally:  # where there is no memory, that may fail too
                # Python notes what ends the script before it calls. A script may also show what it has caught.
                if getattr(sys, "last_value", None) is error:
                    handle(error, handler)

    sys.excepthook = excepthook


def _is_of_console(tb: TracebackType | None) -> bool:
    """Whether an exception was raised by what somebody typed into `code.interact()`."""
    return tb is not None and tb.tb_frame.f_globals.get("__name__") == "code"


def _show_failed_hook(failure: BaseException, error: BaseException, tb: TracebackType | None) -> None:
    """Show what Python shows where a `sys.excepthook` fails, without our frames. Left to Python, it would show them."""
    if is_short(failure):
        raise failure
    without_our_frames(failure)
    sys.stderr.write("Error in sys.excepthook:\n")
    sys.__excepthook__(type(failure), failure, traceback_of(failure))
    sys.stderr.write("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, tb)


def _chain_threading_excepthook(handler: Handler) -> None:
    previous = threading.excepthook

    def excepthook(args: Any) -> None:
        if args.exc_value is not None:
            without_our_frames(args.exc_value)
        previous(args)
        if args.exc_value is not None and _is_called_by_thread(sys._getframe(1)):
            handle(args.exc_value, handler)

    threading.excepthook = excepthook


def _is_called_by_thread(frame: FrameType | None) -> bool:
    """Whether a thread that ends calls its hook, and not a script that shows what it has caught."""
    while frame is not None:
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "invoke_excepthook":
            return True
        frame = frame.f_back
    return False


def _watch_multiprocessing(handler: Handler, child_ends: Callable[[], None]) -> None:
    """`Process._bootstrap` catches what its target raises and prints it; we look when it does."""
    original = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    @functools.wraps(original)
    def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        traceback.print_exc = _watching(traceback.print_exc, original.__code__, handler)
        status = original(process, *args, **kwargs)
        if status == 0:
            child_ends()
        return status

    multiprocessing.process.BaseProcess._bootstrap = _bootstrap  # type: ignore[attr-defined]
    work: Callable[[Any], None] = multiprocessing.process.BaseProcess.run

    @functools.wraps(work)
    def run(process: Any) -> None:
        try:
            work(process)
        except MemoryError:
            headroom.release()  # there may be no room for a single word
            raise

    multiprocessing.process.BaseProcess.run = run  # type: ignore[method-assign, assignment]


def _watch_torch_spawn(handler: Handler) -> None:
    """`torch.multiprocessing.spawn` catches before `Process` does, and sends the traceback to its parent as text."""
    # `torch.multiprocessing.spawn` the attribute is the function; the module of that name is behind it.
    spawn = __import__("torch.multiprocessing.spawn", fromlist=["*"])
    original = spawn._wrap

    @functools.wraps(original)
    def _wrap(*args: Any, **kwargs: Any) -> Any:
        traceback.format_exc = _watching(traceback.format_exc, original.__code__, handler)
        return original(*args, **kwargs)

    # The child finds the wrapper under the same name.
    setattr(spawn, "_wrap", _wrap)  # noqa: B010 - a name of torch's that its stubs do not know


def _watch_queues(handler: Handler) -> None:
    """A queue sends from a thread of its own: what finds no memory on its way is lost, and nobody else is told."""
    original = multiprocessing.queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    @functools.wraps(original)
    def _on_queue_feeder_error(error: BaseException, item: Any) -> Any:
        shown = original(error, item)
        global _lost
        if not _lost and (is_short(error) or os.strerror(errno.ENOSPC) in text_of(error)):
            _lost = True
            handle(error, handler)
        return shown

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        _on_queue_feeder_error
    )


def _watching(show: Callable[..., Any], caller: CodeType, handler: Handler) -> Callable[..., Any]:
    """A function that shows the current exception, and our look at that exception when one caller shows it."""

    @functools.wraps(show)
    def watched(*args: Any, **kwargs: Any) -> Any:
        error = sys.exception()
        if error is None or sys._getframe(1).f_code is not caller:
            return show(*args, **kwargs)
        without_our_frames(error)
        try:
            return show(*args, **kwargs)
        finally:  # where there is no memory, that may fail too
            handle(error, handler)

    return watched
