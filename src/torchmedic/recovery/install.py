"""Recovery put in place: by `torchmedic run --recover`, or by `with torchmedic.recover()`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchmedic import contained as containment
from torchmedic.contained import contained
from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.stages import Stages
from torchmedic.records.plain_text import visible
from torchmedic.records.recovery import Recovery, Refusal, summary
from torchmedic.recovery.backward import GuardedEngine
from torchmedic.recovery.session import Level, Session
from torchmedic.recovery.update_in_parts import foreach_updates, in_parts
from torchmedic.source.objects.living import living


class Installation:
    """Recovery in this process, until it is removed."""

    def __init__(self, level: Level, context: ProcessContext, tell: Callable[[Recovery | Refusal], None]) -> None:
        self.session = session = Session(level, context, tell)
        self._changed: list[tuple[Any, str, Any]] = []
        self._set(Optimizer, "_patch_step_function", _around_build(session, Optimizer._patch_step_function))
        self._set(Optimizer, "state_dict", _around_state_dict(session, Optimizer.state_dict))
        self._set(torch, "compile", _around_compile(session, torch.compile))
        self._set(context, "examining", _around_examining(session))
        self._set(context, "raised", _around_raised(session, context.raised))
        self._guarding = list(_guarding(session))
        session.on_rest, session.on_wake = self._rest, self._wake
        self._wake()
        self._handles = [
            register_optimizer_step_pre_hook(session.update_begins),
            register_optimizer_step_post_hook(session.update_ended),
        ]
        # The hooks that watch look at gradients, which must be in memory again by then.
        hooks: Any = optimizer_module._global_optimizer_post_hooks
        hooks.move_to_end(self._handles[1].id, last=False)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _wake(self) -> None:
        for each in self._guarding:
            each.put()

    def _rest(self) -> None:
        """Take away what only the guard needs: a short step would feel it."""
        for each in reversed(self._guarding):
            each.take_back()

    def remove(self) -> None:
        """Leave torch as it was."""
        self.session.close()
        for handle in self._handles:
            handle.remove()
        self._rest()
        for owner, name, value in reversed(self._changed):
            setattr(owner, name, value)


class _Guarding:
    """A function or object of torch that has a stand-in while the guard may be up."""

    def __init__(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._stand_in = stand_in
        self._original: Any = None
        self._put: Any = None  # the stand-in that is in place

    def put(self) -> None:
        if self._put is None:
            self._original = getattr(self._owner, self._name)
            self._put = self._stand_in(self._original)
            setattr(self._owner, self._name, self._put)

    def take_back(self) -> None:
        if self._put is not None and getattr(self._owner, self._name) is self._put:  # else somebody has wrapped it
            setattr(self._owner, self._name, self._original)
            if isinstance(self._put, GuardedEngine):
                self._put.leave()
            self._put = None


def _guarding(session: Session) -> Iterator[_Guarding]:
    yield _Guarding(torch.autograd.Variable, "_execution_engine", lambda engine: GuardedEngine(session, engine))
    yield _Guarding(Optimizer, "zero_grad", functools.partial(_around_zero_grad, session))
    for module, name in list(foreach_updates()):
        yield _Guarding(module, name, functools.partial(in_parts, is_short=lambda: session.is_up))
    depth = torch._C._len_torch_function_stack
    if containment.has_function_modes is depth:  # the lowest mode is ours, and hides nothing from a hook
        yield _Guarding(containment, "has_function_modes", lambda _: lambda: depth() > session.is_up)


_installed: Installation | None = None


def _forked() -> None:
    if _installed is not None:
        _installed.session.forked()


os.register_at_fork(after_in_child=_forked)


def install(level: Level, context: ProcessContext) -> None:
    """Recover in a watched process to its end; recoveries are written to its events."""
    global _installed
    if _installed is None:
        _installed = Installation(level, context, contained("recover.event")(lambda event: _write(context, event)))


def _write(context: ProcessContext, event: Recovery | Refusal) -> None:
    kind = "recovery" if isinstance(event, Recovery) else "recovery-refused"
    context.open().events.write(kind, **msgspec.structs.asdict(event))


class Recovered(list[Recovery | Refusal]):
    """What happened inside a `with torchmedic.recover()`: recoveries and refusals, oldest first."""

    @property
    def lines(self) -> list[str]:
        """One line for each kind of recovery, with what it took and how to do without it."""
        return summary(
            [each for each in self if isinstance(each, Recovery)], [each for each in self if isinstance(each, Refusal)]
        )


@contextlib.contextmanager
def recover(level: Level = "safe") -> Iterator[Recovered]:
    """Keep training through an out-of-memory inside the block, with the same results.

    A call of torch that runs out of memory is repeated with more room: unused memory is freed, saved activations and
    optimizer state are parked in host memory, or in a file if the host itself is short. A backward pass is repeated
    from its forward pass. Where that is not enough, a module whose rows are independent is called in parts of the
    batch: the results are then the same up to rounding. What cannot be repeated raises as without this block.

    Args:
        level: "safe" does only what leaves the training unchanged; "all" also runs hooks of modules again, and draws
            other random numbers where a module with dropout must be called in parts of the batch.

    Yields:
        The list of what happened, filled as it happens. At the end of the block it is printed to stderr.
    """
    if level not in ("safe", "all"):
        raise ValueError(f"level is {level!r}, not 'safe' or 'all'")
    happened = Recovered()
    if _installed is not None:  # by `torchmedic run --recover`, or by a block around this one
        yield happened
        return
    with contextlib.ExitStack() as stack:
        watching = lifecycle.current()
        if watching is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchmedic-")))
            watching = Agent(folder, lambda _: cast(Stages, _NoStages()))
            watching.hooks.install()
            watching.finite.on = False
            stack.callback(watching.hooks.remove)
        installation = Installation(level, watching, happened.append)
        stack.callback(installation.remove)
        for optimizer in living(Optimizer):
            installation.session.optimizer_built(optimizer)
            watching.clock.optimizer_built(optimizer)
        stack.enter_context(_only(installation))
        yield happened
    sys.stderr.writelines(f"torchmedic: {visible(line)}\n" for line in happened.lines)


@contextlib.contextmanager
def _only(installation: Installation) -> Iterator[None]:
    global _installed
    _installed = installation
    try:
        yield
    finally:
        _installed = None


class _NoStages:
    """Explains nothing: outside of `torchmedic run` the script's own traceback is all there is."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _around_build(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    built = contained("recover.build")(session.optimizer_built)

    @functools.wraps(original)
    def _patch_step_function(optimizer: Any) -> Any:
        result = original(optimizer)
        built(optimizer)
        return result

    return _patch_step_function


def _around_state_dict(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    wanted = contained("recover.state")(session.state_wanted)

    @functools.wraps(original)
    def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if session.optimizers.out:
            wanted()
        return original(optimizer, *args, **kwargs)

    return state_dict


def _around_zero_grad(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `zero_grad` run without the guard: clearing gradients takes no memory."""

    @functools.wraps(original)
    def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.is_up or session.optimizers.out or not session.lower_guard():
            return original(optimizer, *args, **kwargs)
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            session.raise_guard()

    return zero_grad


def _around_examining(session: Session) -> Callable[[], contextlib.AbstractContextManager[None]]:
    original = session.examining

    @contextlib.contextmanager
    def examining() -> Iterator[None]:
        session.state_wanted()  # an examination copies tensors, and the guard does not see that
        with original(), session.splits.left_alone():
            yield

    return examining


def _around_raised(session: Session, original: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """Say why nothing was done about an out-of-memory that ends the run and that the guard did not see."""

    @contained("recover.raised")
    def explain(error: BaseException) -> None:
        if session.refused_step == session.step or not is_out_of_memory(error):
            return
        if session.compiles:
            session.refuse(session.phase, "the script uses torch.compile, and calls of compiled code are not repeated")
        elif session.optimizers.optimizers and not session.is_up:
            session.refuse(session.phase, "calls were not guarded: there was room for eight times the largest step")

    def raised(error: BaseException) -> None:
        explain(error)
        original(error)

    return raised


def _around_compile(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        session.compiled()
        return original(*args, **kwargs)

    return compile
