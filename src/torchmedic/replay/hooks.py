"""Which hook of the user's was called last in a replayed backward, with what, and what it returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch


class Hooked(NamedTuple):
    """One call of a hook on a tensor."""

    hook: Callable[..., Any]
    given: Any
    returned: Any


@contextlib.contextmanager
def watch_hooks(leaves: Iterable[torch.Tensor], seen: list[Hooked]) -> Iterator[None]:
    """Note the calls of hooks that are on some leaves already, and of those that the replay puts on tensors."""

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(gradient: Any) -> Any:
            returned = hook(gradient)
            seen.append(Hooked(hook, gradient, returned))
            return returned

        return call

    original: Callable[..., Any] = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return original(tensor, watched(hook))

    replaced: list[tuple[Any, int, Callable[..., Any]]] = []
    for leaf in leaves:
        hooks = leaf._backward_hooks
        for key, hook in list(hooks.items()) if hooks else ():
            replaced.append((hooks, key, hook))
            hooks[key] = watched(hook)  # type: ignore[index]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]
        for hooks, key, hook in replaced:
            hooks[key] = hook
