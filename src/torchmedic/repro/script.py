"""The text of the script: a docstring, the inputs, the calls, and a check that it still fails."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import torch

from torchmedic.records.plain_text import visible
from torchmedic.repro.program import Program, inverse
from torchmedic.repro.recipe import Bad, Input, Raises
from torchmedic.repro.values import INLINE
from torchmedic.repro.wording import statement

MAX_INLINE_LINES = 40
_WIDTH = 110
_MAX_LITERAL_VALUES = 4


def text(program: Program, values: Path, *, inline: bool | None = None) -> tuple[str, bool]:
    """The source of the script.

    Args:
        program: The failing program.
        values: The file for large values.
        inline: Whether all values are in the text; by default if there are few.

    Returns:
        The source, and whether it needs the file of values.
    """
    if inline is None:
        source, _ = text(program, values, inline=True) if program.size <= INLINE else ("", False)
        if source and source.count("\n") <= MAX_INLINE_LINES:
            return source, False
        inline = False
    loads = not inline and any(_is_loaded(given, program) for given in program.inputs)
    lines = [*_header(program), ""]
    lines += ["from pathlib import Path", ""] if loads else []
    lines += ["import torch"]
    lines += ["from safetensors.torch import load_file"] if loads else []
    lines += [""]
    if program.recipe.deterministic:
        lines.append("torch.use_deterministic_algorithms(True)")
    if loads:
        lines.append(f"tensors = load_file(Path(__file__).with_name({_quoted(values.name)}))")
    for given in program.inputs:
        lines += _input(given, program, inline)
    lines += ["", *_body(program)]
    return "\n".join(lines) + "\n", loads


def _header(program: Program) -> list[str]:
    recipe = program.recipe
    head = [recipe.message]
    if recipe.place:
        head.append(f"{recipe.place}: {recipe.source}" if recipe.source else recipe.place)
    head.append(f"Recorded with torch {recipe.torch}, Python {recipe.python}; made by `torchmedic repro`.")
    words = [_escaped(line) for line in head]
    wrapped = [part for line in words for part in textwrap.wrap(line, _WIDTH, break_long_words=False)[:3]]
    return [f'"""{_escaped(recipe.code)} {_escaped(recipe.name)}', "", *wrapped, '"""']


def _escaped(line: str) -> str:
    """Text for the docstring: in ASCII, and with nothing that could end it."""
    line = visible(" ".join(line.split())).encode("ascii", "backslashreplace").decode()
    return line.replace("\\", "\\\\").replace('"', "'")


def _quoted(text: str) -> str:
    """A string literal in ASCII, with double quotes where that is as short."""
    literal = ascii(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in literal else literal


def _is_loaded(given: Input, program: Program) -> bool:
    return given.fill is None and program.tensors[given.name].numel() > _MAX_LITERAL_VALUES


def _input(given: Input, program: Program, inline: bool) -> list[str]:
    tensor = program.tensors[given.name]
    if not inline and _is_loaded(given, program):
        if tensor.is_complex():
            source = f'torch.view_as_complex(tensors["{given.name}"])'
        else:
            source = f'tensors["{given.name}"]'
    else:
        most = _MAX_LITERAL_VALUES if isinstance(program.recipe.outcome, Bad) else 0
        source = _literal(given, tensor, tensor.numel() <= most or not given.shape)
    device = program.device_of(given)
    if device != "cpu":
        source += f'.to("{device}")'
    if given.grad != "no":
        if source.startswith("torch.") and source.endswith(")") and device == "cpu" and "view_as" not in source:
            source = source[:-1] + ", requires_grad=True)"
        else:
            source += ".requires_grad_()"
    source += {"computed": ".clone()", "view": "[...]"}.get(given.grad, "")
    source = _laid_out(given, source)
    return _wrapped(f"{given.name} = {source}")


def _laid_out(given: Input, source: str) -> str:
    if given.layout == "permuted":
        order, back = ", ".join(map(str, given.order)), ", ".join(map(str, inverse(given.order)))
        return f"{source}.permute({order}).contiguous().permute({back})"
    if given.layout == "expanded":
        index = ", ".join(":1" if dim in given.order else ":" for dim in range(len(given.shape)))
        return f"{source}[{index}].expand({', '.join(map(str, given.shape))})"
    if not given.layout:
        return source
    wider, size = f"{source}.repeat({', '.join(['1'] * (len(given.shape) - 1) + ['2'])})", given.shape[-1]
    if given.layout == "narrowed":
        return f"{wider}[..., :{size}]"
    return f"{wider}.repeat_interleave(2, -1)[..., :{2 * size}:2]"


def _literal(given: Input, tensor: torch.Tensor, few: bool) -> str:
    """The call that makes a tensor; with `few`, its values are written out even if all are equal."""
    shape = ", ".join(map(str, given.shape))
    default = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}.get(given.dtype)
    dtype = f", dtype=torch.{given.dtype}"
    if (not few and given.fill is not None) or (not tensor.numel() and given.shape):
        return _repeated(given, shape, dtype)
    values = _values(tensor)
    guessed = torch.tensor(tensor.tolist()).dtype
    return f"torch.tensor({values}{'' if default is not None and guessed is default else dtype})"


def _repeated(given: Input, shape: str, dtype: str) -> str:
    value = 0 if given.fill is None else given.fill
    factory = "zeros" if value == 0 else "ones" if value == 1 else ""
    if factory and not isinstance(value, bool):
        return f"torch.{factory}({shape or '()'}{'' if given.dtype == 'float32' else dtype})"
    shape = f"({shape},)" if len(given.shape) == 1 else f"({shape})"
    literal = _number(torch.tensor(value, dtype=getattr(torch, given.dtype)))
    return f"torch.full({shape}, {literal}{'' if given.dtype == 'float32' and '.' in literal else dtype})"


def _values(tensor: torch.Tensor) -> str:
    if tensor.dim() == 0:
        return _number(tensor)
    return "[" + ", ".join(_values(part) for part in tensor) + "]"


def _number(value: torch.Tensor) -> str:
    """The shortest text for the same number."""
    if not value.is_floating_point():
        return repr(value.item())
    number = float(value.item())
    if math.isnan(number):
        return "torch.nan"
    if math.isinf(number):
        return "torch.inf" if number > 0 else "-torch.inf"
    for digits in range(1, 18):
        short = repr(float(f"{number:.{digits}g}"))
        if float(torch.tensor(float(short), dtype=value.dtype)) == number:
            return short
    return repr(number)


def _wrapped(line: str) -> list[str]:
    if len(line) <= _WIDTH + 10 or not {"#", "'", '"', "\n"}.isdisjoint(line):
        return [line]
    return textwrap.wrap(line, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _body(program: Program) -> list[str]:
    recipe = program.recipe
    calls = [part for line in recipe.lines for whole in _wrapped(statement(line)) for part in whole.split("\n")]
    if recipe.autocast:
        head = f'with torch.autocast("{program.device}", dtype=torch.{recipe.autocast}):'
        calls = [head, *(f"    {line}" for line in calls)]
    outcome = recipe.outcome
    if isinstance(outcome, Raises):
        return _raising(calls, outcome)
    assert isinstance(outcome, Bad)
    return [*calls, "", *_checked(outcome)]


def _raising(calls: list[str], outcome: Raises) -> list[str]:
    before, last = calls[:-1], calls[-1:]
    while last[0].startswith(" "):
        last.insert(0, before.pop())
    test = f"type(error).__name__ != {_quoted(outcome.kind)}"
    if outcome.fragment:
        test += f" or {_quoted(outcome.fragment)} not in str(error)"
    return [
        *before,
        "try:",
        *(f"    {line}" for line in last),
        "except Exception as error:",
        '    print(f"{type(error).__name__}: {error}")',
        f"    if {test}:",
        '        raise SystemExit("not reproduced: this is another error") from None',
        '    print("reproduced")',
        "else:",
        '    raise SystemExit("not reproduced: no error")',
    ]


def _checked(outcome: Bad) -> list[str]:
    value = outcome.of + (f"[{outcome.item}]" if outcome.item is not None else "") + (".grad" * outcome.gradient)
    what = "NaN" if outcome.kind == "nan" else "infinity"
    inputs = "inputs without NaN" if outcome.given_inf else "finite inputs"
    return [
        f'print("{value} =", {value})',
        f"if not {value}.{'isnan' if outcome.kind == 'nan' else 'isinf'}().any():",
        f'    raise SystemExit("not reproduced: no {what} in {value}")',
        f'print("reproduced: {what} from {inputs}")',
    ]
