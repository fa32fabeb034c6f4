"""The functions of `import torchmedic` for code that torchmedic does not start."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from torchmedic.contained import contained
from torchmedic.integrations.session import Session, session
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent
from torchmedic.observe.failures import exceptions
from torchmedic.observe.failures.shown_tracebacks import without_our_frames
from torchmedic.records import Diagnosis
from torchmedic.runfolder.files import read_diagnoses
from torchmedic.settings import Format, Settings, load, working_folder

# What an agent knows of the step under way.
_OF_STEP = ("notes", "batches", "finite", "kept_backwards", "rewind", "leaks", "marks")

Function = TypeVar("Function", bound=Callable[..., Any])


class Watch:
    """What `torchmedic.watch()` returns: a context manager, and a decorator for functions.

    Attributes:
        run: The run folder, from the beginning of the block on. None in a script that `torchmedic run` has started,
            where the parent process reports.
        diagnoses: What was found in the block so far.
    """

    def __init__(self, flags: dict[str, Any], output: str | None) -> None:
        self._flags = flags
        self._output = output
        self._settings: Settings | None = None
        self._session: Session | None = None

    @property
    def run(self) -> Path | None:
        return self._session.run if self._session is not None else None

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        return tuple(self._session.of_part) if self._session is not None else ()

    def __enter__(self) -> Watch:
        self.begin(sys._getframe(1).f_code)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            if error is not None:
                self._session.failed(error)
            self._session.end()
        elif error is not None:
            self._tell_parent(error)

    def __call__(self, function: Function) -> Function:
        """Watch every call of a function."""
        site = getattr(function, "__code__", function)

        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            with _Call(self, site):
                return await function(*args, **kwargs)

        def generating(*args: Any, **kwargs: Any) -> Any:
            with _Call(self, site):
                return (yield from function(*args, **kwargs))

        def calling(*args: Any, **kwargs: Any) -> Any:
            with _Call(self, site):
                return function(*args, **kwargs)

        call: Callable[..., Any] = calling
        if inspect.iscoroutinefunction(function):
            call = awaiting
        elif inspect.isgeneratorfunction(function):
            call = generating
        return functools.wraps(function)(call)  # type: ignore[return-value]

    def begin(self, site: object) -> None:
        """Enter the block. `site` is the place in the code that does."""
        if self._settings is None:
            self._settings = load(self._flags, folder=working_folder())
        self._session = session(self._settings, Path(sys.argv[0]).name, self._output)
        if self._session is not None:
            self._session.begin(site)

    @contained("session.failed")
    def _tell_parent(self, error: BaseException) -> None:
        agent = lifecycle.current()
        if agent is not None:
            without_our_frames(error)
            exceptions.handle(error, agent.raised)


class _Call:
    """One call of a decorated function."""

    def __init__(self, watch: Watch, site: object) -> None:
        self._watch = watch
        self._site = site

    def __enter__(self) -> None:
        self._watch.begin(self._site)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, traceback)


@overload
def watch(function: Function, /) -> Function: ...
@overload
def watch(
    *,
    output: str | None = None,
    format: Format | None = None,
    confidential: bool | None = None,
    checkup: bool | None = None,
    ignore: Iterable[str] | None = None,
) -> Watch: ...
def watch(
    function: Callable[..., Any] | None = None,
    /,
    *,
    output: str | None = None,
    format: Format | None = None,
    confidential: bool | None = None,
    checkup: bool | None = None,
    ignore: Iterable[str] | None = None,
) -> Any:
    """Watch a block or a function, for code that `torchmedic run` cannot start.

    An exception that leaves the block is explained on stderr and goes on unchanged. A NaN and mistakes that raise no
    error are reported as they are found. The block must hold the training loop, not only one step of it.

    Args:
        function: The function, if `watch` is used as a decorator without arguments.
        output: The run folder, new or empty (default: a new one in `.torchmedic`).
        format: The format on stderr, as `torchmedic run --format`.
        confidential: Whether to write no source, values, names and paths.
        checkup: Whether to search for mistakes that raise no error.
        ignore: Codes of such mistakes that are not reported.

    Returns:
        A context manager that is also a decorator, or the decorated function.

    Raises:
        UsageError: On entry: a setting is wrong, or the output folder cannot be used.
    """
    codes = None if ignore is None else tuple(ignore)
    flags = {"format": format, "confidential": confidential, "checkup": checkup, "ignore": codes}
    made = Watch(flags, output)
    return made if function is None else made(function)


def diagnose(error: BaseException) -> Diagnosis | None:
    """Explain an exception that was caught. Nothing is printed and nothing is written.

    Call it while the frames of the exception still hold the values that made it fail, as in the `except` block.

    Args:
        error: The exception, with its traceback.

    Returns:
        The diagnosis. Its code is TM900 if no rule explains the exception. None for `KeyboardInterrupt`, `SystemExit`
        and exceptions that only repeat the failure of another process.
    """
    folder = Path(tempfile.mkdtemp(prefix="torchmedic-"))
    try:
        return _diagnosed(error, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()  # what was examined has references to the frames, and so to the user's tensors


def _diagnosed(error: BaseException, folder: Path) -> Diagnosis | None:
    from torchmedic.examine.conductor import Conductor

    agent = Agent(folder, Conductor)
    watching = lifecycle.current()
    with contextlib.ExitStack() as stack:
        if watching is not None:
            for name in _OF_STEP:
                setattr(agent, name, getattr(watching, name))
            agent.clock = watching.clock.copied()
            stack.enter_context(watching.paused())
        exceptions.look_at(error, agent.raised)
    agent.close()
    found = list(read_diagnoses(agent.claimed).values()) if agent.claimed is not None else []
    return found[-1] if found else None
