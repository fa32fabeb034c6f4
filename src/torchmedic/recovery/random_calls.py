"""Which functions of torch draw random numbers, and the state of the generators before such a call."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

# Functions in Python, or made of several operators, that draw numbers in one of them.
_COMPOSITE = frozenset(
    "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout fractional_max_pool2d "
    "fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices gumbel_softmax "
    "multi_head_attention_forward random_ rrelu rrelu_ scaled_dot_product_attention".split()
)
_KEPT_STATES = 8
_NOTED_DRAWS = 2  # after each part of a step
_known: dict[Any, bool] = {}


def draws(function: Any) -> bool:
    """Whether a function may draw random numbers."""
    found = _known.get(function)
    if found is None:
        name = getattr(function, "__name__", "")
        found = _known[function] = name in _COMPOSITE or is_seeded(name) or is_seeded(name.rstrip("_"))
    return found


@functools.cache
def is_seeded(name: str) -> bool:
    """Whether an operator of this name says that it uses a seed."""
    if not name or name.startswith("__"):
        return False
    try:
        operator = getattr(torch.ops.aten, name)
        return any(
            torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags for overload in operator.overloads()
        )
    except (AttributeError, RuntimeError):
        return False


class RandomState(NamedTuple):
    """The default generators of the host and of all CUDA devices at one moment."""

    rng: torch.Tensor
    device_rng: list[torch.Tensor]

    def is_same(self, other: RandomState) -> bool:
        pairs = zip([self.rng, *self.device_rng], [other.rng, *other.device_rng], strict=False)
        return len(self.device_rng) == len(other.device_rng) and all(torch.equal(a, b) for a, b in pairs)


def random_state() -> RandomState:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return RandomState(torch.default_generator.get_state(), [each.get_state() for each in devices])


def generator_states(kwargs: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Read the state of all generators that a call can draw from; the result puts them back."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += list(torch.cuda.default_generators)
    given = (kwargs or {}).get("generator")
    if isinstance(given, torch.Generator):
        generators.append(given)
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back


class RandomNumbers:
    """Where the random numbers of a step may have begun."""

    def __init__(self) -> None:
        self.states: deque[RandomState] = deque(maxlen=_KEPT_STATES)  # of the default generators
        self._noted_draws = 0
        # Generators that calls were given, each as it was before the first of these calls.
        self._first: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def next_part(self) -> None:
        """The next step, or the next part of one, begins."""
        self.states.append(random_state())
        self._first.clear()
        self._noted_draws = 0

    def draws(self, generator: Any) -> None:
        """A call is about to draw random numbers; before a step begins, a loader may have drawn some."""
        if isinstance(generator, torch.Generator):
            if id(generator) not in self._first:
                self._first[id(generator)] = (generator, generator.get_state())
        elif self._noted_draws < _NOTED_DRAWS:
            self._noted_draws += 1
            self.states.append(random_state())

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """The given generators are as before the step inside the block, and as they were after it."""
        now = [(generator, generator.get_state()) for generator, _ in self._first.values()]
        for generator, state in self._first.values():
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)
