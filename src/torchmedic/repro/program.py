"""A recipe with its tensors: builds it from live arguments, runs it, and checks that it fails as recorded."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import Any

import msgspec
import torch

from torchmedic.replay.trace.microscope import Captured
from torchmedic.repro.arguments import Inputs
from torchmedic.repro.aten import Spelling, hints
from torchmedic.repro.recipe import Bad, Input, Line, Raises, Recipe
from torchmedic.repro.wording import statement

_OPERATOR = re.compile(r"^[a-z_]\w*: ")
_NUMBERS = re.compile(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:(?:\s*x\s*|,\s*)-?\d+(?:\.\d+)?)*")

_MIN_FRAGMENT, _MAX_FRAGMENT = 16, 60  # characters


class Program:
    """Calls and their inputs. Programs are immutable: every `with_...` returns another one.

    Everything runs on the CPU, so that anyone can run it; with `at_home`, inputs are on the devices of the recording.
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
        """Number of stored values; a tensor of one repeated value counts as none."""
        return sum(self.tensors[given.name].numel() for given in self.inputs if given.fill is None)

    @property
    def bytes(self) -> int:
        return sum(self.tensors[given.name].nbytes for given in self.inputs if given.fill is None)

    def with_tensors(self, changed: dict[str, torch.Tensor]) -> Program:
        """A program with other values of the same dtypes."""
        return self._with_inputs(
            {name: {"shape": tuple(new.shape), "fill": None} for name, new in changed.items()}, changed
        )

    def with_shapes(self, changed: dict[str, torch.Tensor]) -> Program:
        """A program with parts of the same tensors; an input of one repeated value stays one."""
        return self._with_inputs({name: {"shape": tuple(new.shape)} for name, new in changed.items()}, changed)

    def with_fill(self, name: str, value: bool | int | float) -> Program:
        """A program with one repeated value in one input."""
        old = self.tensors[name]
        filled = torch.full(tuple(old.shape), value, dtype=old.dtype, device="cpu")
        return self._with_inputs({name: {"fill": value}}, {name: filled})

    def with_input(self, name: str, **changes: Any) -> Program:
        """A program with one changed input: its layout, or whether it has a gradient."""
        return self._with_inputs({name: changes}, {})

    def _with_inputs(self, changes: dict[str, dict[str, Any]], tensors: dict[str, torch.Tensor]) -> Program:
        inputs = tuple(msgspec.structs.replace(given, **changes.get(given.name, {})) for given in self.inputs)
        return self._like(msgspec.structs.replace(self.recipe, inputs=inputs), {**self.tensors, **tensors})

    def with_recipe(self, **changes: Any) -> Program:
        return self._like(msgspec.structs.replace(self.recipe, **changes), self.tensors)

    def variants(self) -> list[Program]:
        """The program on the CPU and, if inputs were on other devices, the program on those devices."""
        if all(given.device == "cpu" for given in self.inputs):
            return [self]
        return [self, Program(self.recipe, self.tensors, at_home=True)]

    def device_of(self, given: Input) -> str:
        return given.device if self.at_home else "cpu"

    @property
    def device(self) -> str:
        """The type of device that the program runs on."""
        kinds = (self.device_of(given).partition(":")[0] for given in self.inputs)
        return next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")

    def _like(self, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> Program:
        other = Program(recipe, tensors, at_home=self.at_home)
        if recipe.lines is self.recipe.lines:
            other._code = self._code
        return other

    def holds(self) -> bool:
        """Whether the program fails as its recipe says."""
        wanted = self.recipe.outcome
        if isinstance(wanted, Raises):
            raised = self.error()
            return raised is not None and type(raised).__name__ == wanted.kind and pattern(raised) == wanted.pattern
        return isinstance(wanted, Bad) and self._clean(wanted) and self.badness(wanted) == wanted.kind

    def error(self) -> Exception | None:
        """The exception that the program raises."""
        try:
            self.run()
        except Exception as error:
            return error
        return None

    def badness(self, at: Bad) -> str | None:
        """`nan` or `inf` if a value is bad after a run, else None."""
        try:
            names = self.run()
            value = names[at.of]
            if at.item is not None:
                value = value[at.item]
            if at.gradient:  # torch warns of a look at the gradient of another tensor
                value = value.grad if value.is_leaf or value.retains_grad else None
            if at.gradient and any(badness(result) for result in _results(self.recipe, names)):
                return None  # the forward pass is bad, not only the gradient
        except Exception:
            return None
        return badness(value)

    def run(self) -> dict[str, Any]:
        """Run the calls, and return all variables. The state of the random generators is restored."""
        if self._code is None:
            text = "\n".join(statement(line) for line in self.recipe.lines)
            self._code = compile(text, "<repro>", "exec", dont_inherit=True)
        # A recipe names no builtin function but `slice`. torch's C code imports with that of the running frame.
        names: dict[str, Any] = {"torch": torch, "__builtins__": {"slice": slice, "__import__": __import__}}
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
    """`nan` if a tensor contains NaN, else `inf` if it contains infinity, else None."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    value = value.detach()
    if value.dtype.itemsize == 1:
        value = value.float()
    if bool(value.isnan().any()):
        return "nan"
    return "inf" if bool(value.isinf().any()) else None


def built(values: torch.Tensor, given: Input) -> torch.Tensor:
    """The tensor that the calls get for an input: in its layout, with its place in the graph."""
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
    """The first line of an error's text without its numbers, which change when shapes shrink."""
    return _NUMBERS.sub("#", first_line(error))[:200]


def fragment(error: BaseException) -> str:
    """A part of an error's text without numbers: the first that is long enough to be specific, else the longest."""
    parts = [part.strip(" ,.:;()[]'\"`=") for part in _NUMBERS.split(first_line(error))]
    told = next((part for part in parts if len(part) >= _MIN_FRAGMENT), max(parts, key=len, default=""))
    return told if len(told) <= _MAX_FRAGMENT else told[:_MAX_FRAGMENT].rpartition(" ")[0]


def first_line(error: BaseException) -> str:
    """Leaves out the operator that torch 2.15 puts in front, which depends on arguments: `addmm: mat1 and ...`."""
    return _OPERATOR.sub("", (str(error).splitlines() or [""])[0])


def called(spelling: Spelling, names: list[str], inputs: Inputs, *, result: str = "result") -> Line:
    """The line of a recipe for a spelling; its tensors become inputs."""
    padded = [*names, *[""] * len(spelling.args)]
    return Line(
        target=spelling.target,
        args=tuple(inputs.argument(value, hint) for value, hint in zip(spelling.args, padded, strict=False)),
        kwargs={key: inputs.argument(value, key) for key, value in spelling.kwargs.items()},
        result=result,
    )


def named(captured: Captured, spelling: Spelling) -> list[str]:
    """Names for the arguments of a spelling, whose order may differ from the operation's."""
    known = {
        id(value): hint
        for value, hint in zip(captured.args, hints(captured.func, captured.args), strict=False)
        if isinstance(value, torch.Tensor)
    }
    return [known.get(id(value), "") for value in spelling.args]


def made(header: Recipe, inputs: Inputs, lines: list[Line], outcome: Any) -> Program:
    recipe = msgspec.structs.replace(header, inputs=tuple(inputs.specs), lines=tuple(lines), outcome=outcome)
    return Program(recipe, inputs.tensors)
