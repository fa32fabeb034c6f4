"""Which hook of the user's was called last in a replayed backward, with what, and what it returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.source.returns import code_of, with_return_line


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
