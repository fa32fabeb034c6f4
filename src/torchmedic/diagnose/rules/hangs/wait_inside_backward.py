"""Code that runs inside `backward()` waits and never returns.

What: a hook or the `backward` of a custom function waits for a lock, an event, a queue or another thread, while the
backward pass waits for the hook. If the event comes only after the backward pass, or from a thread that itself waits
for this pass, none of them can ever continue.

Why: hooks that pass gradients to a thread and wait until the thread has read them; a lock that the training loop holds
around `loss.backward()` and that a hook also takes; a second backward in another thread.

Cure: do not wait in a hook: put the work into a queue and wait for it after `backward()` has returned.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import at, stall_rule
from torchmedic.records.inside import PyFrame, PyThread
from torchmedic.records.stall import Stall

_ENGINE = "_engine_run_backward"


@stall_rule("TM515", "wait-inside-backward")
def check(stall: Stall) -> Draft | None:
    inner = stall.inner
    for thread in inner.threads if inner is not None else ():
        hook, backward = _in_backward(thread, stall)
        wanted = thread.waits_for
        if hook is None or wanted is None or thread.moved:
            continue
        draft = check.draft(stall, "likely")
        draft.message = (
            f"`{hook.function}`, which runs inside of the backward pass, waits for {wanted.kind} `{wanted.name}`"
        )
        draft.cause = "the backward pass waits for it to return, and nothing moves"
        draft.at(at(hook, "cause", "this waits while the backward pass waits for it"))
        draft.at(at(backward, "surfaced", "the backward pass was started here"))
        return draft.help("do not wait inside a hook: pass the work on, and wait for it after `backward()`")
    return None


def _in_backward(thread: PyThread, stall: Stall) -> tuple[PyFrame | None, PyFrame | None]:
    """The user's frame that the engine has called, and the one that has called the engine."""
    engine = next((at for at, frame in enumerate(thread.frames) if frame.function == _ENGINE), None)
    if engine is not None:
        inner = next((frame for frame in thread.frames[:engine] if frame.user), None)
        return inner, next((frame for frame in thread.frames[engine:] if frame.user), None)
    main = stall.thread
    # A thread of the engine's own: Python sees nothing around the hook. Of the user's threads it sees the start.
    started = any(frame.function == "_bootstrap" for frame in thread.frames)
    if main is None or thread.main or started or not main.frames or main.frames[0].function != _ENGINE:
        return None, None
    return thread.user_frame, main.user_frame
