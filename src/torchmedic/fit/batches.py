"""The batch size of a script: where it is set, and the largest one that fits.

A batch size is an argument of the script, a number in its source that is named like one, or the batch size of a
DataLoader. Whether a place really sets the batch is tried: the script is run with half of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.fit.analysis import need_of
from torchmedic.fit.cards import Card
from torchmedic.fit.changes import Change, Literal
from torchmedic.fit.trials import Trials
from torchmedic.records.fit import NOWHERE, Batch, Line, Need, Trace
from torchmedic.replay.fake.births import Course, between

_NAME = re.compile(r"batch_?size|(^|_)batch($|_)|(^|_)bs($|_)|(^|_)bsz($|_)|batchsize|^b$", re.IGNORECASE)
_OTHER = re.compile(r"eval|valid|test|num|count|idx|index|first|norm|accum", re.IGNORECASE)
_FACTORIES = frozenset("randn rand randint zeros ones empty full normal".split())
_MAX_BATCH = 1 << 20
_MAX_CHECKS = 4


class Knob(NamedTuple):
    """A place that may set the batch size."""

    current: int
    line: Line = NOWHERE
    literals: tuple[Literal, ...] = ()
    argument: int | None = None  # the position of the argument that holds the number

    def change(self, value: int, arguments: tuple[str, ...], base: Change | None = None) -> Change:
        base = base or Change()
        if self.literals:
            return base.with_(literals=tuple(Literal(each.line, each.column, value) for each in self.literals))
        if self.argument is not None:
            words = list(arguments)
            name, equals, _ = words[self.argument].rpartition("=")
            words[self.argument] = f"{name}{equals}{value}"
            return base.with_(arguments=tuple(words))
        return base.with_(loader=value, loader_was=self.current)


class BatchSizes:
    """Runs of the script at other batch sizes."""

    def __init__(self, trials: Trials, trace: Trace) -> None:
        self.trials = trials
        self.trace = trace
        self.why = ""
        self.other: Trace | None = None  # at half of the batch, or at two
        self.knob = self._find()

    def run(self, size: int, base: Change | None = None) -> Trace:
        """The course at a batch size; with further changes if they are given."""
        assert self.knob is not None
        return self.trials.run(self.knob.change(size, self.trials.arguments, base))

    @property
    def half(self) -> int:
        assert self.knob is not None
        return max(1, self.knob.current // 2) if self.knob.current > 1 else 2

    def _find(self) -> Knob | None:
        for knob in _knobs(self.trials, self.trace):
            self.knob = knob
            trace = self.run(self.half)
            if not trace.error and trace.batch != self.trace.batch and trace.sizes != self.trace.sizes:
                self.other = trace
                return knob
        self.why = "no place was found that sets the batch size: name it `batch_size`, or pass it as --batch-size"
        return None

    def sizes_at(self, size: int) -> list[int] | None:
        """Bytes of every storage at a batch size; None if the two runs took different courses."""
        assert self.other is not None
        one, two = (Course(each.events, each.sizes) for each in (self.trace, self.other))
        found = between(one, two, self._share(size))
        return found.sizes if found is not None else None

    def _share(self, size: int) -> float:
        """Where a size lies on the way from the size of the script to the other one."""
        assert self.knob is not None
        return (size - self.knob.current) / (self.half - self.knob.current)

    def need_at(self, size: int, card: Card) -> Need:
        """The need at a batch size, from the two courses that are known."""
        assert self.other is not None
        sizes = self.sizes_at(size)
        if sizes is not None:
            return need_of(self.trace, card, sizes=sizes)
        one, two = need_of(self.trace, card), need_of(self.other, card)
        share = self._share(size)
        reserved = round(one.reserved + share * (two.reserved - one.reserved))
        allocated = round(one.allocated + share * (two.allocated - one.allocated))
        fits = reserved <= card.memory - card.context
        return Need(allocated=allocated, reserved=reserved, context=card.context, fits=fits)


def largest(sizes: BatchSizes, card: Card) -> Batch:
    """The largest batch that fits: from the courses of two sizes, and then run at that size."""
    knob = sizes.knob
    if knob is None:
        return Batch(why=sizes.why)
    size = _search(sizes, card)
    for _ in range(_MAX_CHECKS):
        if size < 1:
            return Batch(current=knob.current, line=knob.line, why="not even one row fits")
        checked = sizes.run(size)
        if checked.error:
            return Batch(current=knob.current, line=knob.line, why=f"the run at {size} could not be followed")
        need = need_of(checked, sizes.trials.card)
        if need.fits:
            rows = _rows(sizes.trace, checked) * knob.current
            if rows < 0.99 * size:  # the data ended before the batch was full
                return Batch(
                    current=knob.current, size=int(rows), need=need, line=knob.line, why="there is no more data"
                )
            return Batch(current=knob.current, size=size, need=need, line=knob.line)
        size = min(size - 1, int(size * 0.98))
    return Batch(current=knob.current, line=knob.line, why="the largest batch could not be confirmed by a run")


def _rows(one: Trace, other: Trace) -> float:
    """How many times more rows the batch of another run has."""
    first, second = (max((shape[0] for shape in trace.batch), default=1) for trace in (one, other))
    return second / first


def _search(sizes: BatchSizes, card: Card) -> int:
    """The largest size that fits by the two courses; 0 if none does."""
    low, high = 0, 1
    while high <= _MAX_BATCH and sizes.need_at(high, card).fits:
        low, high = high, high * 2
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        if sizes.need_at(middle, card).fits:
            low = middle
        else:
            high = middle
    return low


def _knobs(trials: Trials, trace: Trace) -> Iterator[Knob]:
    """Places that may set the batch size, the likely ones first."""
    rows = {shape[0] for shape in trace.batch}
    tree = ast.parse(trials.script.read_bytes())
    found = [*_arguments(trials.arguments), *_named(tree, str(trials.script))]
    yield from sorted(found, key=lambda knob: knob.current not in rows and knob.current not in trace.loader_sizes)
    for size in dict.fromkeys(trace.loader_sizes):
        yield Knob(size)
    for size in dict.fromkeys(shape[0] for shape in trace.batch):
        literals = _in_factories(tree, size)
        if size > 1 and literals:
            yield Knob(size, Line(str(trials.script), literals[0].line), tuple(literals))


def _arguments(words: tuple[str, ...]) -> Iterator[Knob]:
    for position, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if not _is_batch_size(name.replace("-", "_").rpartition(".")[2]):
            continue
        if equals and value.isdigit():
            yield Knob(int(value), argument=position)
        elif not equals and position + 1 < len(words) and words[position + 1].isdigit():
            yield Knob(int(words[position + 1]), argument=position + 1)


def _named(tree: ast.Module, file: str) -> Iterator[Knob]:
    """Numbers in the source that are named like a batch size."""
    for node in ast.walk(tree):
        for name, value in _bindings(node):
            if (
                isinstance(value, ast.Constant)
                and type(value.value) is int
                and value.value > 0
                and _is_batch_size(name)
            ):
                literal = Literal(value.lineno, value.col_offset, value.value)
                yield Knob(value.value, Line(file, value.lineno), (literal,))


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        targets = [each for target in node.targets for each in ast.walk(target)]
        names = [getattr(each, "id", None) or getattr(each, "attr", "") for each in targets]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
        flat = [each for each in names if each]
        yield from (
            zip(flat, values, strict=False) if len(flat) == len(values) else ((each, node.value) for each in flat)
        )
    elif isinstance(node, ast.AnnAssign):
        yield str(getattr(node.target, "id", None) or getattr(node.target, "attr", "")), node.value
    elif isinstance(node, ast.Dict):
        yield from ((str(getattr(key, "value", "")), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.arguments):
        with_default = node.args[len(node.args) - len(node.defaults) :]
        yield from ((each.arg, value) for each, value in zip(with_default, node.defaults, strict=True))
        yield from ((each.arg, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True))
    elif isinstance(node, ast.Call):
        yield from ((each.arg or "", each.value) for each in node.keywords)
        flags = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        default = next((each.value for each in node.keywords if each.arg == "default"), None)
        if flags and default is not None:
            yield from ((each.lstrip("-").replace("-", "_"), default) for each in flags)


def _in_factories(tree: ast.Module, size: int) -> list[Literal]:
    """The number as the first size in calls that make tensors."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in _FACTORIES:
            continue
        firsts = [each.elts[0] for each in node.args if isinstance(each, ast.Tuple | ast.List) and each.elts]
        for each in firsts or node.args[:1]:
            if isinstance(each, ast.Constant) and type(each.value) is int and each.value == size:
                found.append(Literal(each.lineno, each.col_offset, size))
    return found


def _is_batch_size(name: str) -> bool:
    return bool(_NAME.search(name)) and not _OTHER.search(name)
