"""The promise that a bug of ours never stops or changes the training.

Every function of ours that runs inside the user's process is wrapped by `contained`. A fault is handed to
`report_fault` once, the faulty hook is switched off for the rest of the run, and the user's code goes on.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torchmedic.records import Fault

P = ParamSpec("P")
R = TypeVar("R")

# The contract tests name a hook here, which then raises at every call.
INJECT_VARIABLE = "TORCHMEDIC_INJECT_FAULT"

_SHORT = (
    os.strerror(errno.ENOMEM),
    "can't allocate memory",
    "std::bad_alloc",
    "can't start new thread",
    "failed to map segment from shared object",
)

_broken: set[str] = set()
_names: set[str] = set()
_report: Callable[[Fault], None] | None = None
_injected: str | None = None


def _nobody(callback: Any) -> Any:
    return callback


# torch.compile looks at every Python frame that runs below a compiled function. Ours are not its business: the agent
# puts here what exchanges its callback, so that none of our code is ever compiled.
step_aside: Callable[[Any], Any] = _nobody


def on_fault(report: Callable[[Fault], None] | None) -> None:
    """Say who is told of a contained fault."""
    global _report, _injected
    _report = report
    _injected = os.environ.get(INJECT_VARIABLE)


def hook_names() -> frozenset[str]:
    """Every contained hook that has been defined so far in this process."""
    return frozenset(_names)


def owning_up(fault: Fault, details: str = "") -> str:
    """What the user is told of a bug of ours, in one line."""
    more = fault.error + (f"; details in {details}" if details else "")
    return f"torchmedic: a fault of its own in {fault.where} was contained, the run was not affected ({more})\n"


def report_fault(where: str, error: BaseException) -> None:
    """Tell of a fault, once. What only happened to interrupt our code is no fault of it and is raised again."""
    if _is_of_signal_handler(error):
        raise error
    if where in _broken or isinstance(error, RecursionError) or is_short(error):
        return
    _broken.add(where)
    if _report is None:
        return
    try:
        _report(
            Fault(
                where=where,
                error=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
            )
        )
    except Exception:  # the last line of defence: there is nobody left to tell
        return


def is_short(error: BaseException) -> bool:
    """Whether code of ours has failed for want of memory, which is no fault of it."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error)  # of an exception of the user's, perhaps, which may fail at that
    except Exception:
        return False
    return any(word in text for word in _SHORT)


def contained(where: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a hook of ours harmless: on a fault it returns None now and does nothing from then on."""
    _names.add(where)

    def decorate(hook: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(hook)
        def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if where in _broken:
                return None
            compiler = step_aside(None)
            if compiler is None and where != _injected:  # nearly always, and worth a path of its own
                try:
                    return hook(*args, **kwargs)
                except (RecursionError, MemoryError):
                    return None  # what the user's code has used up, ours may be the first to miss
                except Exception as error:
                    report_fault(where, error)
                    return None
            try:
                if where == _injected:
                    raise RuntimeError("injected fault")
                return hook(*args, **kwargs)
            except (RecursionError, MemoryError):
                return None
            except Exception as error:
                report_fault(where, error)
                return None
            finally:
                if compiler is not None:
                    step_aside(compiler)

        return safe

    return decorate


def _is_of_signal_handler(error: BaseException) -> bool:
    """Whether a Python signal handler raised this, the user's own or torch's for a dead worker.

    It does so wherever the main thread is.
    """
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in handlers:
            return True
        tb = tb.tb_next
    return False
