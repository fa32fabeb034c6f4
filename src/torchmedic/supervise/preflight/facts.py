"""Facts about a script, read without running it: loaders and the size of their batches, processes, prompts."""

from __future__ import annotations

import ast
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torchmedic.supervise.preflight.constants import Constants, Unknown, dotted, name_of
from torchmedic.supervise.preflight.sources import Source, read_script

_DEFAULT_PREFETCH = 2
_POSITIONAL = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
_TORCH = frozenset({"torch", "torchvision", "torchaudio", "transformers", "lightning", "pytorch_lightning"})
_DEBUGGERS = frozenset({"pdb.set_trace", "ipdb.set_trace", "pudb.set_trace", "IPython.embed", "code.interact"})
_HUGGING_FACE = "dataloader_num_workers"
_INTERACTIVE_WORDS = ("debug", "interactive", "isatty")
_SIZES_ONLY = ("randn", "rand", "zeros", "ones", "empty")


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """One call of DataLoader. None where the source does not show a value. `start` is the start method of workers."""

    place: str
    call: ast.Call
    source: Source
    workers: int | None = None
    batch_size: int | None = None
    prefetch: int = _DEFAULT_PREFETCH
    start: str = "fork"
    arguments: dict[str, ast.expr] = {}


class ScriptFacts(msgspec.Struct, frozen=True, kw_only=True):
    sources: list[Source]
    constants: Constants
    loaders: list[Loader]
    start: str  # the default start method
    threads: int | None = None
    memory_fraction: bool = False
    prompts: list[tuple[str, str]] = []
    settings: dict[str, str] = {}
    late_settings: list[tuple[str, str]] = []


def read_facts(script: Path, cores: int | None = None) -> ScriptFacts:
    """Read a script and the modules beside it. Raises UsageError if the script does not exist, or is not Python."""
    sources = read_script(script)
    constants = Constants((source.tree for source in sources), cores)
    nodes = [(source, node) for source in sources for node in ast.walk(source.tree)]
    calls = [(source, node) for source, node in nodes if isinstance(node, ast.Call)]
    start = _start_method(calls, constants)
    settings, late = _settings(sources[0], constants)
    threads = [constants.known(call.args[0]) for _, call in calls if name_of(call) == "set_num_threads" and call.args]
    return ScriptFacts(
        sources=sources,
        constants=constants,
        loaders=[_loader(*call, constants, start) for call in calls if _makes_loader(call[1])],
        start=start,
        threads=threads[0] if len(threads) == 1 and isinstance(threads[0], int) else None,
        memory_fraction=any(name_of(call) == "set_per_process_memory_fraction" for _, call in calls),
        prompts=[prompt for source in sources for prompt in _prompts(source)],
        settings=settings,
        late_settings=late,
    )


def _start_method(calls: list[tuple[Source, ast.Call]], constants: Constants) -> str:
    for _, call in calls:
        if name_of(call) == "set_start_method":
            given = (
                call.args[0]
                if call.args
                else next((word.value for word in call.keywords if word.arg == "method"), None)
            )
            if isinstance(method := constants.known(given), str):
                return method
    return multiprocessing.get_all_start_methods()[0]  # the first is the default


def _makes_loader(call: ast.Call) -> bool:
    return name_of(call) == "DataLoader" or any(word.arg == _HUGGING_FACE for word in call.keywords)


def _loader(source: Source, call: ast.Call, constants: Constants, start: str) -> Loader:
    given = dict(zip(_POSITIONAL, call.args, strict=False))
    for word in call.keywords:
        if word.arg is not None:
            given[word.arg] = word.value
        else:
            given |= _unpacked(constants.expression(word.value))
    # The Hugging Face trainer uses another name.
    workers = given.get("num_workers", given.get(_HUGGING_FACE))
    number = constants.known(workers) if workers is not None else 0
    batch = constants.known(given["batch_size"]) if "batch_size" in given else 1
    prefetch = constants.known(given.get("prefetch_factor"))
    context = constants.known(given.get("multiprocessing_context"))
    return Loader(
        place=source.at(call),
        call=call,
        source=source,
        workers=number if isinstance(number, int) else None,
        batch_size=batch if isinstance(batch, int) else None,
        prefetch=prefetch if isinstance(prefetch, int) else _DEFAULT_PREFETCH,
        start=context if isinstance(context, str) else start,
        arguments=given,
    )


def _unpacked(node: ast.expr | None) -> dict[str, ast.expr]:
    """The arguments in `DataLoader(data, **{"num_workers": 2})` and `**dict(num_workers=2)`."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    if isinstance(node, ast.Call) and name_of(node) == "dict":
        return {word.arg: word.value for word in node.keywords if word.arg is not None}
    return {}


def _settings(script: Source, constants: Constants) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """OpenMP and CUDA variables that the script sets at top level: before torch reads them, and after."""
    before: dict[str, str] = {}
    late: list[tuple[str, str]] = []
    torch_line: int | None = None
    for statement in script.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) and torch_line is None:
            names = (
                [alias.name for alias in statement.names]
                if isinstance(statement, ast.Import)
                else [statement.module or ""]
            )
            if any(name.split(".")[0] in _TORCH for name in names):
                torch_line = statement.lineno
        name, value = _setting(statement)
        if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "CUDA_")):
            continue
        if torch_line is not None and not name.startswith("CUDA_"):  # CUDA_* is read when CUDA is first used
            late.append((script.at(statement), name))
        elif isinstance(known := constants.known(value), str):
            before[name] = known
    return before, late


def _setting(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=where, slice=ast.Constant(value=str(name)))], value=value):
            return (name, value) if dotted(where).endswith("environ") else ("", None)
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr="setdefault"), args=[ast.Constant(value=str(name)), value])
        ):
            return name, value
    return "", None


def _prompts(source: Source) -> Iterator[tuple[str, str]]:
    """Calls that wait for keyboard input, without those under a condition such as `if debug`."""
    rebound = _bound_names(source.tree)

    def walk(node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.If | ast.IfExp) and any(
            word in ast.unparse(node.test).lower() for word in _INTERACTIVE_WORDS
        ):
            for other in node.orelse if isinstance(node.orelse, list) else [node.orelse]:
                yield from walk(other)
            return
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            builtin = name in ("breakpoint", "input") and name not in rebound
            if builtin or name in _DEBUGGERS or (name == "set_trace" and name in rebound):
                yield source.at(node), f"{name}()"
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(source.tree)


def _bound_names(tree: ast.Module) -> frozenset[str]:
    """Names that the file itself defines: `input` is a common name for a tensor."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name for alias in names)
    return frozenset(found)


def batch_bytes(loader: Loader, constants: Constants) -> int | None:
    """Bytes of the largest batch; None if unknown."""
    shapes = _shapes(loader, constants)
    if not shapes or not loader.batch_size or "collate_fn" in loader.arguments:
        return None
    return sum(width * min(loader.batch_size, shape[0]) * math.prod(shape[1:]) for width, shape in shapes)


def dataset_length(loader: Loader, constants: Constants) -> int | None:
    shapes = _shapes(loader, constants)
    return shapes[0][1][0] if shapes else None


def _shapes(loader: Loader, constants: Constants) -> list[tuple[int, list[int]]]:
    """Bytes per element and shape of every tensor of a TensorDataset; empty if one of them is unknown."""
    data = constants.expression(loader.arguments.get("dataset"))
    if not (isinstance(data, ast.Call) and name_of(data) == "TensorDataset" and data.args):
        return []
    if loader.arguments.keys() & {"batch_sampler", "sampler"}:
        return []
    found = []
    for part in data.args:
        made = constants.expression(part)
        shape = _shape(made, constants) if isinstance(made, ast.Call) else None
        if not shape or made is None:
            return []
        found.append((8 if name_of(made) == "randint" else 4, shape))
    return found


def _shape(made: ast.Call, constants: Constants) -> list[int] | None:
    """The shape in `torch.randn(2, 3)`, `torch.zeros((2, 3))` or `torch.randint(0, 5, (2, 3))`; None if unknown."""
    if any(word.arg in ("dtype", "size") for word in made.keywords):
        return None
    try:
        if name_of(made) in _SIZES_ONLY:
            given = [constants.value(each) for each in made.args]
            sizes = given[0] if len(given) == 1 and isinstance(given[0], list) else given
        elif name_of(made) == "randint":
            sizes = next((value for each in made.args if isinstance(value := constants.value(each), list)), [])
        else:
            return None
    except Unknown:
        return None
    return sizes if all(isinstance(number, int) and number >= 0 for number in sizes) else None
