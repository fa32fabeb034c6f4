"""The recipe of a failed operation in a run folder: a few calls, their arguments, and the expected failure.

`repro-<n>.json` belongs to `diagnosis-<n>.json` beside it; values are in `repro-<n>.safetensors`. The files may come
from another person, so they are read as data, never as code: every word that goes into a script is checked first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import encode
from torchmedic.runfolder.files import write_atomically

FORMAT = 1

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TARGET = re.compile(
    r"torch\._?[a-z]\w*|torch\.(?:nn\.functional|linalg|special|fft|distributions)\.\w+|torch\._C\._nn\.\w+|torch\.nn\.[A-Z]\w*"
    r"|torch\.ops\.aten\.\w+\.\w+|Tensor\.\w+|operator\.\w+|call|sum_backward"
)
_FORBIDDEN = re.compile(r"file|load|save|import|compile|hub")
_DEVICE = re.compile(r"[a-z]+(?::\d+)?")
_ATTRIBUTE = re.compile(
    r"torch\.(?:b?float\w*|half|double|u?int\d*|long|short|bool|bits\w*|q\w+|c(?:omplex|half|float|double)\w*|strided|jagged"
    r"|sparse\w*|_mkldnn|\w+_format|channels_last\w*)"
)

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
        recipe = msgspec.json.decode(path.read_bytes(), type=Recipe)
        check(recipe)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadableRun(f"cannot read {path}: it is damaged ({error})") from None
    return recipe


def check(recipe: Recipe) -> None:
    """Check that a recipe contains only names, numbers and attributes of torch.

    Raises:
        ValueError: It contains anything else.
    """
    if recipe.format != FORMAT:
        raise ValueError(f"format {recipe.format}, not {FORMAT}")
    for given in recipe.inputs:
        _check_name(given.name)
        _check_name(given.dtype)
        if not _DEVICE.fullmatch(given.device):
            raise ValueError(f"device {given.device!r}")
    for line in recipe.lines:
        if not _TARGET.fullmatch(line.target) or _FORBIDDEN.search(line.target):
            raise ValueError(f"call of {line.target!r}")
        if line.target == "call" and line.args[:1] != (Ref("layer"),):
            raise ValueError("call of what is no layer")
        if line.result == "layer" and not line.target.startswith("torch.nn."):
            raise ValueError(f"layer from {line.target!r}")
        for name in (line.result or "_", *line.kwargs):
            _check_name(name)
        for argument in (*line.args, *line.kwargs.values()):
            _check_argument(argument)
    _check_name(recipe.autocast or "none")
    if isinstance(recipe.outcome, Raises):
        _check_name(recipe.outcome.kind)
    elif recipe.outcome is not None:
        _check_name(recipe.outcome.of)


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise ValueError(f"name {text!r}")


def _check_argument(argument: Argument) -> None:
    if isinstance(argument, Ref):
        _check_name(argument.name)
    elif isinstance(argument, Special):
        if argument.text not in ("inf", "-inf", "nan", "...") and not _ATTRIBUTE.fullmatch(argument.text):
            raise ValueError(f"argument {argument.text!r}")
    elif isinstance(argument, Many | Slice):
        for part in argument.items if isinstance(argument, Many) else argument.parts:
            _check_argument(part)
