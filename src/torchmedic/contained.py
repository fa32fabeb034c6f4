"""Containment: a bug in torchmedic never stops or changes the training.

Every torchmedic function that runs inside the user's process is wrapped by `contained`. The first fault of a hook goes
to `report_fault`, the hook is switched off for the rest of the run, and the user's code continues.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torchmedic.records import Fault
from torchmedic.records.plain_text import visible

P = ParamSpec("P")
R = TypeVar("R")

# The contract tests put the name of a hook here; the hook then raises at every call.
INJECT_VARIABLE = "TORCHMEDIC_INJECT_FAULT"

_OUT_OF_MEMORY_TEXTS = (
    os.strerror(errno.ENOMEM),
    "can't allocate memory",
    "std::bad_alloc",
    "can't start new thread",
    "failed to map segment from shared object",
)

# The system refuses to write, whatever the file. With another error, it matters whose file it is.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE})

# Packages whose lines run inside of a hook, and whose exceptions may be faults of the hook.
_OWN = frozenset({"torchmedic", "torch", "msgspec", "psutil", "numpy", "pandas", "rich", "jinja2"})

_broken: set[str] = set()
_run = ""
_report: Callable[[Fault], None] | None = None
_injected: str | None = None


def _no_compiler(callback: Any) -> Any:
    return callback


# torch.compile inspects every Python frame that runs below a compiled function. The agent replaces this function by one
# that exchanges torch.compile's frame callback, so that no torchmedic code is compiled.
step_aside: Callable[[Any], Any] = _no_compiler


_below_compiled = 0  # hooks that run now, and have stepped aside for torch.compile


def is_below_compiled() -> bool:
    """Whether torch.compile inspects the Python frames that run now, or would if a hook had not stepped aside."""
    callback = step_aside(None)
    if callback is not None:
        step_aside(callback)
    return callback is not None or _below_compiled > 0


def _nothing() -> Any:
    return None


# The agent puts here whether modes of the user's and profilers would see operations of ours, and what hides those.
# What `hide` returns ends the hiding. Three questions, as one function of ours would take longer than all three.
has_function_modes: Callable[[], object] = _nothing
has_dispatch_modes: Callable[[], object] = _nothing
is_profiling: Callable[[], object] = _nothing
hide: Callable[[], Callable[[], None] | None] = _nothing


def is_sound() -> bool:
    """Whether no hook has failed, and none is made to fail."""
    return not _broken and _injected is None


def on_fault(report: Callable[[Fault], None] | None, run: str = "") -> None:
    """Set the function that receives contained faults, and the run folder, in which nothing but torchmedic fails."""
    global _report, _injected, _run
    _report = report
    _run = run
    _injected = os.environ.get(INJECT_VARIABLE)


def fault_line(fault: Fault, details: str = "") -> str:
    """The line that tells the user about a contained fault."""
    if fault.refused:
        return visible(f"torchmedic: the run is watched less than usual: {fault.refused}") + "\n"
    more = visible(fault.error + (f"; details in {details}" if details else ""))
    return f"torchmedic: a fault of its own in {fault.where} was contained, the run was not affected ({more})\n"


def report_fault(where: str, error: BaseException) -> None:
    """Report a fault once. An exception that a signal handler raised in our code is no fault, and is raised again."""
    pass_signals_on(error)
    try:
        if where in _broken or isinstance(error, RecursionError) or is_short(error):
            return
        _broken.add(where)
        if _report is None:
            return
        _report(
            Fault(
                where=where,
                error=f"{type(error).__name__}: {text_of(error)}",
                traceback="".join(traceback.format_exception(error)),
                refused=refusal(error),
            )
        )
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # the report itself failed; nothing is left to report to
        pass_signals_on(failure)


def pass_signals_on(error: BaseException) -> None:
    """Raise an exception again that is meant for the user's code, as to end a step that takes too long."""
    if _is_for_user(error):
        raise error


class _Tolerant:
    """Suppresses every exception but those that are meant for the user's code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, Exception) and not _is_for_user(error)


tolerant = _Tolerant()  # around a look at objects of the user's, which may raise anything


def refusal(error: BaseException) -> str:
    """What the system refused torchmedic, which is no bug; empty if the error is not about that."""
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    if error.errno == errno.ENOENT and error.filename is None:  # `os.getcwd()` says so
        return "the working folder has been deleted"
    file = error.filename if isinstance(error.filename, str) else ""
    if error.errno not in _NO_ROOM and not (_run and file.startswith(_run)):
        return ""
    return f"cannot write: {os.strerror(error.errno)}" + (f" ({file})" if file else "")


def text_of(error: BaseException) -> str:
    """The message of an exception. The user's own `__str__` may raise anything, also `SystemExit`."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"<no message: its __str__ raised {type(failure).__name__}>"


def is_short(error: BaseException) -> bool:
    """Whether torchmedic code failed because memory ran out, which is not its fault."""
    if isinstance(error, MemoryError):
        return True
    text = text_of(error)
    return any(words in text for words in _OUT_OF_MEMORY_TEXTS)


def contained(where: str, *, computes: bool = True) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorate a hook so that it returns None on a fault, and does nothing from then on.

    Args:
        where: The name of the hook in reports of faults.
        computes: Whether the hook may run an operation of torch, which is hidden from modes and profilers of the user.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(hook)
        def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
            global _below_compiled
            if where in _broken:
                return None
            compiler = step_aside(None)
            shown = hide() if computes and (has_function_modes() or has_dispatch_modes() or is_profiling()) else None
            if compiler is None and shown is None and where != _injected:  # the fast path
                try:
                    return hook(*args, **kwargs)
                except (RecursionError, MemoryError):
                    return None  # the user's code used up the stack or the memory
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    report_fault(where, error)
                    return None
            _below_compiled += compiler is not None
            try:
                if where == _injected:
                    raise RuntimeError("injected fault")
                return hook(*args, **kwargs)
            except (RecursionError, MemoryError):
                return None
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                report_fault(where, error)
                return None
            finally:
                if shown is not None:
                    shown()
                if compiler is not None:
                    _below_compiled -= 1
                    step_aside(compiler)

        return safe

    return decorate


def _is_for_user(error: BaseException) -> bool:
    """Whether an error came from outside: a signal handler raised it (the user's own, torch's for a dead worker), or
    somebody sent it to this thread (`PyThreadState_SetAsyncExc`).

    What is sent is raised by whatever line runs: an exception of a foreign class, and no line of a foreign file.
    """
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    tb, last = error.__traceback__, None
    while tb is not None:
        if tb.tb_frame.f_code in handlers:
            return True
        last = tb.tb_frame.f_globals.get("__name__")
        tb = tb.tb_next
    known = _OWN | sys.stdlib_module_names
    return isinstance(last, str) and _package(last) in known and _package(type(error).__module__) not in known


def _package(module: str) -> str:
    return module.partition(".")[0]
