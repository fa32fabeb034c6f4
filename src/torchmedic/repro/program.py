"""A recipe with its tensors at hand: run it, and see whether it fails as it must."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import Any

import msgspec
import torch

from torchmedic.repro.recipe import Bad, Input, Raises, Recipe
from torchmedic.repro.wording import statement

_NUMBERS = re.compile(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:(?:\s*x\s*|,\s*)-?\d+(?:\.\d+)?)*")

_TOLD, _LONGEST = 16, 60  # characters


class Program:
    """Calls and their inputs. Programs are not changed: every `with_...` gives another one.

    All of it runs on the host, so that anybody can run it; `at_home` is for what fails only where it was recorded.
    """

    def __init__(self, recipe: Recipe, tensors: dict[str, torch.Tensor], *, at_home: bool = False) -> None:
        self.recipe = recipe
        self.tensors = tensors
        self.at_home = at_home
        self._code: CodeType | None = None

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.recipe.inputs

    @property
    def size(self) -> int:
        """How many numbers it holds; a tensor of one repeated value counts as none."""
        return sum(self.tensors[given.name].numel() for given in self.inputs if given.fill is None)

    @property
    def bytes(self) -> int:
        return sum(self.tensors[given.name].nbytes for given in self.inputs if given.fill is None)

    def with_tensors(self, changed: dict[str, torch.Tensor]) -> Program:
        """The same calls on other values, of the same dtypes."""
        inputs = tuple(
            msgspec.structs.replace(given, shape=tuple(changed[given.name].shape), fill=None)
            if given.name in changed
            else given
            for given in self.inputs
        )
        return self._like(msgspec.structs.replace(self.recipe, inputs=inputs), {**self.tensors, **changed})

    def with_fill(self, name: str, value: bool | int | float) -> Program:
        """All elements of one input the same."""
        old = self.tensors[name]
        inputs = tuple(
            msgspec.structs.replace(given, fill=value) if given.name == name else given for given in self.inputs
        )
        filled = torch.full(tuple(old.shape), value, dtype=old.dtype, device="cpu")
        return self._like(msgspec.structs.replace(self.recipe, inputs=inputs), {**self.tensors, name: filled})

    def with_input(self, name: str, **changes: Any) -> Program:
        """One input described otherwise: its layout, or whether it has a gradient."""
        inputs = tuple(
            msgspec.structs.replace(given, **changes) if given.name == name else given for given in self.inputs
        )
        return self._like(msgspec.structs.replace(self.recipe, inputs=inputs), self.tensors)

    def with_recipe(self, **changes: Any) -> Program:
        return self._like(msgspec.structs.replace(self.recipe, **changes), self.tensors)

    def variants(self) -> list[Program]:
        """On the host, and where there were others, on the devices of its inputs."""
        if all(given.device == "cpu" for given in self.inputs):
            return [self]
        return [self, Program(self.recipe, self.tensors, at_home=True)]

    def device_of(self, given: Input) -> str:
        return given.device if self.at_home else "cpu"

    @property
    def device(self) -> str:
        """The kind of device that most of it runs on."""
        kinds = (self.device_of(given).partition(":")[0] for given in self.inputs)
        return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")

    def _like(self, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> Program:
        other = Program(recipe, tensors, at_home=self.at_home)
        if recipe.lines is self.recipe.lines:
            other._code = self._code
        return other

    def holds(self) -> bool:
        """Whether it fails as its recipe says."""
        wanted = self.recipe.outcome
        if isinstance(wanted, Raises):
            raised = self.error()
            return raised is not None and type(raised).__name__ == wanted.kind and pattern(raised) == wanted.pattern
        return isinstance(wanted, Bad) and self._clean(wanted) and self.badness(wanted) == wanted.kind

    def error(self) -> Exception | None:
        """What it raises."""
        try:
            self.run()
        except Exception as error:
            return error
        return None

    def badness(self, at: Bad) -> str | None:
        """What is wrong with a value after a run: `nan`, `inf`, or nothing."""
        try:
            names = self.run()
            value = names[at.of]
            if at.item is not None:
                value = value[at.item]
            value = value.grad if at.gradient else value
            if at.gradient and any(badness(result) for result in _results(self.recipe, names)):
                return None  # then it is the forward pass that went wrong, not the gradient
        except Exception:
            return None
        return badness(value)

    def run(self) -> dict[str, Any]:
        """All variables after the last call. Random numbers are drawn, but nobody else's."""
        if self._code is None:
            text = "\n".join(statement(line) for line in self.recipe.lines)
            self._code = compile(text, "<repro>", "exec", dont_inherit=True)
        names: dict[str, Any] = {"torch": torch}
        devices = range(torch.cuda.device_count()) if self.device == "cuda" else []
        with _quiet(self.recipe.deterministic), torch.random.fork_rng(devices=devices):
            for given in self.inputs:
                names[given.name] = built(self.tensors[given.name].to(self.device_of(given)), given)
            with self._autocast():
                exec(self._code, names)
        return names

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self.recipe.autocast
        return torch.autocast(self.device, dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext()

    def _clean(self, wanted: Bad) -> bool:
        for given in self.inputs:
            found = badness(self.tensors[given.name])
            if found == "nan" or (found == "inf" and not wanted.given_inf):
                return False
        return True


@contextlib.contextmanager
def _quiet(deterministic: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(deterministic)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _results(recipe: Recipe, names: dict[str, Any]) -> Iterator[Any]:
    for line in recipe.lines:
        if line.result in names:
            yield names[line.result]


def badness(value: Any) -> str | None:
    """`nan` if a tensor holds any, else `inf`, else None."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    value = value.detach()
    if value.dtype.itemsize == 1:
        value = value.float()
    if bool(value.isnan().any()):
        return "nan"
    return "inf" if bool(value.isinf().any()) else None


def built(values: torch.Tensor, given: Input) -> torch.Tensor:
    """An input as the calls get it: in its layout, with its place in the graph."""
    tensor = values.detach().clone(memory_format=torch.contiguous_format)
    if given.grad != "no":
        tensor.requires_grad_()
    if given.grad == "computed":
        tensor = tensor.clone()
    elif given.grad == "view":
        tensor = tensor.view_as(tensor)
    if given.layout == "permuted":
        tensor = tensor.permute(given.order).contiguous().permute(inverse(given.order))
    elif given.layout == "expanded":
        tensor = tensor[tuple(slice(0, 1) if dim in given.order else slice(None) for dim in range(tensor.dim()))]
        tensor = tensor.expand(given.shape)
    elif given.layout == "narrowed":
        tensor = torch.cat((tensor, tensor), -1)[..., : given.shape[-1]]
    elif given.layout == "gapped":
        tensor = torch.cat((tensor, tensor), -1).repeat_interleave(2, -1)[..., : 2 * given.shape[-1] : 2]
    return tensor


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(position) for position in range(len(order)))


def pattern(error: BaseException) -> str:
    """The first line of an error's text with the numbers taken out: they change when shapes shrink."""
    return _NUMBERS.sub("#", first_line(error))[:200]


def fragment(error: BaseException) -> str:
    """A part of an error's text that holds no number: the first that is long enough to be told, else the longest."""
    parts = [part.strip(" ,.:;()[]'\"`=") for part in _NUMBERS.split(first_line(error))]
    told = next((part for part in parts if len(part) >= _TOLD), max(parts, key=len, default=""))
    return told if len(told) <= _LONGEST else told[:_LONGEST].rpartition(" ")[0]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
