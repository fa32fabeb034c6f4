"""A hook on a gradient returned a value that cannot replace the gradient.

What: a hook may return a gradient that replaces the one it received. The returned gradient must be a tensor of the same
shape; a hook on a module returns one gradient per input.

Why: the hook returns a value that it computed for a log (a norm, a sum), a number, or too few or too many gradients. A
lambda always returns something. A hook can be registered only on a tensor that requires a gradient.

Cure: return `None` from a hook that only observes, and a gradient of the same shape from a hook that changes the
gradient.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.custom_functions import head_location
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layers import roots
from torchmedic.source.objects.graph import leaves_behind
from torchmedic.source.returns import code_of, with_return_line
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.syntax import first_line, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

Blamed = tuple[Callable[..., Any] | None, Any, Any, int]

_SIZE = re.compile(r"hook '(.*?)' has changed the (size|type|device) of value")
_TYPE = re.compile(r"expected Variable, but hook returned '(.*?)'")
_COUNT = re.compile(r"Backward hook returned an invalid number of grad_input, got (\d+), but expected (\d+)")


@rule("TM117", "bad-hook")
def check(evidence: RaisedEvidence) -> Draft | None:
    size, kind, count = (pattern.search(evidence.message) for pattern in (_SIZE, _TYPE, _COUNT))
    if evidence.says("register a hook on a tensor that doesn't require gradient"):
        return _too_soon(evidence)
    if size is None and kind is None and count is None:
        return _forward(evidence) if evidence.kinds & {"TypeError", "AttributeError"} else None
    failure = BackwardFailure(evidence)
    hook, given, returned, line = _hook(evidence, failure, size[1] if size else "")
    name = f"the hook `{getattr(hook, '__name__', type(hook).__name__)}`" if hook is not None else "a hook"
    if count is not None:
        what = f"{count[1]} gradients where the module has {count[2]} input{'s' if count[2] != '1' else ''}"
    elif kind is not None:
        what = f"a value of type {kind[1]}"
    else:
        assert size is not None
        what = f"a gradient of another {size[2]}"
        if isinstance(given, tuple) and isinstance(returned, tuple):
            given, returned = next(
                ((a, b) for a, b in zip(given, returned, strict=False) if a is not None), (None, None)
            )
        if isinstance(given, torch.Tensor) and isinstance(returned, torch.Tensor) and size[2] == "size":
            what = f"{list(returned.shape)} where it was given {list(given.shape)}"
    draft = check.draft(evidence, "proven" if hook is not None else "likely")
    draft.message = f"{name} returned {what}"
    draft.cause = "what a hook returns takes the place of the gradient, so it must be one of the same shape, or `None`"
    place = _returned(hook, line) if hook is not None else None
    draft.at(place)
    draft.mark(failure.caller, "surfaced" if place is not None else "cause", "the hook is called from here")
    return draft.help("return `None` from a hook that only looks, else a gradient of the same shape, dtype and device")


def _hook(evidence: RaisedEvidence, failure: BackwardFailure, name: str) -> Blamed:
    """The hook to blame, what it was given, what it returned, and from which line."""
    for frame in reversed(evidence.frames):
        hook = frame.variables.get("hook")
        if not frame.is_user and callable(hook) and frame.function in ("_apply_on_tensors", "fn", "hook", "grad_hook"):
            return hook, None, None, 0
    seen: list[Hooked] = []
    step = failure.replay()
    if step is not None:
        leaves = leaves_behind(failure.roots)
        step.runner.play(watch_hooks(leaves, step.runner.modules, seen))
    for last in reversed([hooked for hooked in seen if hooked.is_bad] or seen):
        return last.hook, last.given, last.returned, last.line
    named = [hook for leaf in leaves_behind(failure.roots) for hook in (leaf._backward_hooks or {}).values()]
    fitting = [hook for hook in named if getattr(hook, "__name__", "") == name]
    return (fitting[0] if len(fitting) == 1 else None), None, None, 0


def _forward(evidence: RaisedEvidence) -> Draft | None:
    """A hook on a module returned something else than a tensor, which took the place of the module's output."""
    if not any(child._forward_hooks for root in roots(evidence.frames) for child in root.modules()):
        return None
    try:
        step = evidence.failing_step()
    except CannotCut:
        return None
    seen: list[Hooked] = []
    step.runner.play(_watch_outputs(step.runner.modules, seen), backward=False)
    bad = [each for each in seen if isinstance(each.given, torch.Tensor) and not _fits(each.returned)]
    if not bad or not any(_is_complaint(evidence, type(each.returned)) for each in bad):
        return None
    hook, returned = bad[-1].hook, type(bad[-1].returned).__name__
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"the hook `{getattr(hook, '__name__', type(hook).__name__)}` returned a {returned} in place of a tensor"
    )
    draft.cause = "what a forward hook returns takes the place of the module's output, unless it is `None`"
    place = _returned(hook, bad[-1].line, "this takes the place of the output")
    draft.at(place, *evidence.at_user_line("surfaced" if place is not None else "cause", f"a {returned} arrives here"))
    return draft.help("return the new output alone, or `None` from a hook that only looks")


def _fits(returned: Any) -> bool:
    return returned is None or isinstance(returned, torch.Tensor)


def _is_complaint(evidence: RaisedEvidence, kind: type) -> bool:
    """Whether the exception is about a value of this type."""
    return re.search(rf"\b{re.escape(kind.__name__)}\b", evidence.message) is not None


@contextlib.contextmanager
def _watch_outputs(modules: Iterable[torch.nn.Module], seen: list[Hooked]) -> Iterator[None]:
    """Note the calls of forward hooks: the output that each was given, and what it returned."""

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            returned, line = with_return_line(code_of(hook), lambda: hook(*args, **kwargs))
            seen.append(Hooked(hook, args[-1], returned, line))
            return returned

        return call

    tables = {id(child): child._forward_hooks for module in modules for child in module.modules()}
    kept = [(hooks, dict(hooks)) for hooks in tables.values()]
    for hooks, own in kept:
        hooks.update({key: watched(hook) for key, hook in own.items()})
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _returned(
    hook: Callable[..., Any], line: int, label: str = "this takes the place of the gradient"
) -> Location | None:
    """The `return` of a hook that was taken, or its only one, else its head; a lambda is its own."""
    code = code_of(hook)
    if code is None or not is_user_file(code.co_filename):
        return None
    for node in nodes_in(syntax_tree(code.co_filename)):
        if not isinstance(node, ast.FunctionDef | ast.Lambda) or first_line(node) != code.co_firstlineno:
            continue
        if isinstance(node, ast.Lambda):
            return node_location("cause", code.co_filename, node.body, "a lambda returns what it computes")
        returns = [part for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
        taken = [part for part in returns if has_line(part, line)]
        chosen = taken or (returns if len(returns) == 1 else [])
        if chosen:
            return node_location("cause", code.co_filename, chosen[0], label)
        return head_location("cause", code.co_filename, node, "returned from here")
    return None


def _too_soon(evidence: RaisedEvidence) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "a hook was put on a tensor that does not require a gradient"
    draft.cause = "no gradient will ever come to this tensor, so the hook would never be called"
    draft.at(*evidence.at_user_line("cause", "this tensor does not require a gradient"))
    return draft.help(
        "put the hook on a tensor that is computed from parameters with gradients on, or call `requires_grad_()`"
    )


class Hooked(NamedTuple):
    """One call of a hook on a tensor or a module."""

    hook: Callable[..., Any]
    given: Any  # the gradient, or the gradients of a module's inputs
    returned: Any
    line: int = 0  # that it returned from

    @property
    def is_bad(self) -> bool:
        """Whether what it returned cannot take the place of what it was given."""
        if self.returned is None:
            return False
        many = isinstance(self.given, tuple)
        given = self.given if many else (self.given,)
        returned = self.returned if many and isinstance(self.returned, tuple) else (self.returned,)
        return len(given) != len(returned) or any(_differs(*pair) for pair in zip(given, returned, strict=True))


def _differs(given: Any, returned: Any) -> bool:
    if returned is None or given is None:
        return False
    return not isinstance(returned, torch.Tensor) or returned.shape != given.shape or returned.device != given.device


@contextlib.contextmanager
def watch_hooks(
    leaves: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module], seen: list[Hooked]
) -> Iterator[None]:
    """Note the calls of hooks that are on some leaves and modules, and of those that the replay puts on tensors."""

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            returned, line = with_return_line(code_of(hook), hook, *args)
            seen.append(Hooked(hook, args[1] if len(args) > 1 else args[0], returned, line))
            return returned

        return call

    original: Callable[..., Any] = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return original(tensor, watched(hook))

    replaced: list[tuple[Any, int, Callable[..., Any]]] = []
    owners: list[Any] = [*leaves, *(child for module in modules for child in module.modules())]
    for hooks in {id(owner._backward_hooks): owner._backward_hooks for owner in owners}.values():
        for key, hook in list(hooks.items()) if hooks else ():
            replaced.append((hooks, key, hook))
            hooks[key] = watched(hook)
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]
        for hooks, key, hook in replaced:
            hooks[key] = hook
