"""The recipe of a failed operation in a run folder: a few calls, their arguments, and the expected failure.

`repro-<n>.json` belongs to `diagnosis-<n>.json` beside it; values are in `repro-<n>.safetensors`. The files may come
from another person, so they are read as data, never as code: every word that goes into a script is checked first, here
and in `allowed.py`.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import encode
from torchmedic.runfolder import reading
from torchmedic.runfolder.files import write_atomically

FORMAT = 1

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_TARGET = re.compile(
    r"(?:torch|torch\.(?:nn|nn\.functional|linalg|special|fft|distributions|_C\._nn)|Tensor)\.[A-Za-z_][A-Za-z0-9_]*"
    r"|torch\.ops\.aten\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*"
)
_DEVICE = re.compile(r"(?:cpu|cuda|mps|xpu|hpu|meta)(?::[0-9]{1,3})?")
_DTYPE = (
    r"(?:b?float[0-9][0-9a-z_]*|float|half|double|u?int[0-9]*|long|short|bool|bits[0-9][0-9x]*|qu?int[0-9][0-9x]*"
    r"|complex[0-9]+|c(?:half|float|double))"
)
_CONSTANT = re.compile(
    rf"torch\.(?:{_DTYPE}|strided|jagged|sparse_(?:coo|csr|csc|bsr|bsc)|_mkldnn|channels_last(?:_3d)?"
    r"|(?:contiguous|preserve)_format)"
)
_NUMBERS = frozenset({"inf", "-inf", "nan", "..."})

# What a line can be besides a call of a function: a call of the layer, and `result.sum().backward()`.
STATEMENTS = frozenset({"call", "sum_backward"})
OPERATORS = (
    "add +  sub -  mul *  truediv /  floordiv //  mod %  pow **  matmul @  "
    "and_ &  or_ |  xor ^  lt <  le <=  gt >  ge >=  eq ==  ne !=  "
    "iadd +=  isub -=  imul *=  itruediv /=  ifloordiv //=  imod %=  "
    "ipow **=  imatmul @=  iand &=  ior |=  ixor ^="
).split()
INFIX = dict(zip(OPERATORS[::2], OPERATORS[1::2], strict=True))
PREFIX = {"neg": "-", "invert": "~"}
_COUNTS = {**dict.fromkeys(INFIX, 2), **dict.fromkeys(PREFIX, 1), "getitem": 2, "setitem": 3}  # of arguments

# Names that mean something else in the script, or in the process that makes it.
TAKEN = frozenset({"torch", "Path", "load_file", "tensors", "error", *keyword.kwlist, *dir(builtins)})
RESULTS = frozenset({"result", "output", "layer"})

_MAX_FILE_BYTES = 4 << 20
_MAX_INPUTS, _MAX_LINES = 256, 32
_MAX_ITEMS = 4096  # items of a list
_MAX_DEPTH = 8  # levels of lists in lists
_MAX_CHARACTERS = 20_000  # characters of one text
_MAX_INPUT_ELEMENTS = 1 << 28
_MAX_SIZE = 1 << 63  # size of a number that is a size, a position or an argument

Leafhood = Literal["no", "leaf", "computed", "view"]
Layout = Literal["", "permuted", "expanded", "narrowed", "gapped"]


class Ref(msgspec.Struct, frozen=True, tag="ref"):
    """An input, or the result of an earlier call."""

    name: str


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    value: bool | int | float | str | None


class Special(msgspec.Struct, frozen=True, tag="special"):
    """A value that JSON cannot express: `inf`, `-inf`, `nan`, `...`, or an attribute such as `torch.float16`."""

    text: str


class Many(msgspec.Struct, frozen=True, tag="many"):
    items: tuple[Argument, ...]
    kind: Literal["list", "tuple"] = "list"


class Slice(msgspec.Struct, frozen=True, tag="slice"):
    parts: tuple[Argument, Argument, Argument]


Argument = Ref | Plain | Special | Many | Slice


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One call.

    `target` is a torch function, `Tensor.<method>`, `operator.<name>`, `call` for a layer, or `sum_backward`.
    """

    target: str
    args: tuple[Argument, ...] = ()
    kwargs: dict[str, Argument] = {}
    result: str = ""
    no_grad: bool = False
    note: str = ""


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """An input tensor of the calls. `fill` is its value if all its elements are equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    grad: Leafhood = "no"
    layout: Layout = ""
    order: tuple[int, ...] = ()  # of the dimensions, for "permuted"; which ones, for "expanded"
    fill: bool | int | float | None = None


class Raises(msgspec.Struct, frozen=True, tag="raises"):
    """The last call raises. `pattern` is the message without its numbers, `fragment` a part of it without numbers."""

    kind: str
    fragment: str
    pattern: str


class Bad(msgspec.Struct, frozen=True, tag="bad"):
    """A value is NaN or infinite although the inputs are not."""

    kind: Literal["nan", "inf"]
    of: str  # the name of a result, or of an input if `gradient` is true
    item: int | None = None
    gradient: bool = False
    given_inf: bool = False  # infinities in the inputs are intended


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The failing calls, or the reason in `why_not` if there are none."""

    format: int = FORMAT
    code: str
    name: str
    message: str
    place: str = ""
    source: str = ""
    torch: str = ""
    python: str = ""
    why_not: str = ""
    inputs: tuple[Input, ...] = ()
    lines: tuple[Line, ...] = ()
    outcome: Raises | Bad | None = None
    autocast: str = ""  # its dtype
    deterministic: bool = False


def json_path(folder: Path, number: int) -> Path:
    return folder / f"repro-{number}.json"


def recipes(folder: Path) -> list[Path]:
    """The recordings of one process, in the order of its diagnoses."""
    return sorted(folder.glob("repro-*.json"))


def values_path(recipe: Path) -> Path:
    return recipe.with_suffix(".safetensors")


def write(path: Path, recipe: Recipe, values: bytes | None) -> None:
    if values is not None:
        write_atomically(values_path(path), values)
    write_atomically(path, encode(recipe))


def read(path: Path) -> Recipe:
    """Read a recipe back.

    Raises:
        UnreadableRun: It is damaged, of a later format, or contains something that is not allowed in a recipe.
    """
    try:
        recipe = reading.decode(reading.read(path, _MAX_FILE_BYTES), Recipe)
        check(recipe)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableRun(f"cannot read {path}: it is damaged ({error})") from None
    return recipe


def check(recipe: Recipe) -> None:
    """Check that a recipe contains only names, numbers and constants of torch, and refers only to what it contains.

    Which functions may be called is checked by `allowed.py`, which needs torch.

    Raises:
        ValueError: It contains anything else.
    """
    if recipe.format != FORMAT:
        newer = ", it was made by a newer torchmedic" if recipe.format > FORMAT else ""
        raise ValueError(f"format {recipe.format}, not {FORMAT}{newer}")
    if len(recipe.inputs) > _MAX_INPUTS or len(recipe.lines) > _MAX_LINES:
        raise ValueError(f"{len(recipe.inputs)} inputs and {len(recipe.lines)} calls")
    for text in (recipe.code, recipe.name, recipe.message, recipe.place, recipe.source, recipe.torch, recipe.python):
        _check_length(text)
    known: set[str] = set()
    for given in recipe.inputs:
        _check_input(given, known)
        known.add(given.name)
    for line in recipe.lines:
        _check_line(line, known)
        if line.result:
            known.add(line.result)
    if recipe.autocast and not re.fullmatch(_DTYPE, recipe.autocast):
        raise ValueError(f"autocast to {recipe.autocast!r}")
    if isinstance(recipe.outcome, Raises):
        _check_name(recipe.outcome.kind.lstrip("_"))
        _check_length(recipe.outcome.fragment)
    elif recipe.outcome is not None:
        _check_known(recipe.outcome.of, known)
        _check_sizes(recipe.outcome.item or 0)


def _check_input(given: Input, known: set[str]) -> None:
    _check_name(given.name)
    if given.name in TAKEN | RESULTS | known:
        raise ValueError(f"an input with the name {given.name!r}")
    if not re.fullmatch(_DTYPE, given.dtype) or not _DEVICE.fullmatch(given.device):
        raise ValueError(f"dtype {given.dtype!r} on device {given.device!r}")
    _check_sizes(*given.shape, *given.order)
    if len(given.shape) > _MAX_INPUTS or math.prod(given.shape) > _MAX_INPUT_ELEMENTS:
        raise ValueError(f"the shape of {given.name!r}")


def _check_line(line: Line, known: set[str]) -> None:
    kind, _, name = line.target.rpartition(".")
    if kind == "operator":
        if _COUNTS.get(name) != len(line.args) or line.kwargs:
            raise ValueError(f"call of {line.target!r}")
    elif line.target not in STATEMENTS and not _TARGET.fullmatch(line.target):
        raise ValueError(f"call of {line.target!r}")
    if (kind == "torch.nn") != (line.result == "layer") or (line.result == "layer" and "layer" in known):
        raise ValueError(f"a layer from {line.target!r}")
    owner = line.args[0].name if line.args and isinstance(line.args[0], Ref) else ""
    if line.target == "call" and owner != "layer":
        raise ValueError("call of what is no layer")
    if (kind == "Tensor" or line.target == "sum_backward") and owner in ("", "layer"):
        raise ValueError(f"{line.target!r} of what is no tensor")
    for name in (line.result or "result", *line.kwargs):
        _check_name(name)
    if line.result in TAKEN or any(keyword.iskeyword(key) for key in line.kwargs):
        raise ValueError(f"a name in the call of {line.target!r}")
    _check_length(line.note)
    for argument in (*line.args, *line.kwargs.values()):
        _check_argument(argument, known, 0)


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise ValueError(f"name {text[:40]!r}")


def _check_known(name: str, known: set[str]) -> None:
    if name not in known:
        raise ValueError(f"{name[:40]!r}, which is neither an input nor a result")


def _check_length(text: str) -> None:
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a text of {len(text)} characters")


def _check_sizes(*sizes: int) -> None:
    if any(not -_MAX_SIZE <= size <= _MAX_SIZE for size in sizes):
        raise ValueError("a number that is too large")


def _check_argument(argument: Argument, known: set[str], depth: int) -> None:
    if isinstance(argument, Ref):
        _check_known(argument.name, known)
    elif isinstance(argument, Plain):
        if isinstance(argument.value, str):
            _check_length(argument.value)
        elif type(argument.value) is int:
            _check_sizes(argument.value)
    elif isinstance(argument, Special):
        if argument.text not in _NUMBERS and not _CONSTANT.fullmatch(argument.text):
            raise ValueError(f"argument {argument.text[:40]!r}")
    else:
        parts = argument.items if isinstance(argument, Many) else argument.parts
        if depth > _MAX_DEPTH or len(parts) > _MAX_ITEMS:
            raise ValueError("a list that is too large")
        for part in parts:
            _check_argument(part, known, depth + 1)
