"""What a replay takes over instead of computing it again: results of statements, batches, items of iterators.

`observation, reward = env.step(action)` changes the world, and `batch = buffer.sample(32)` would draw another batch.
Where no gradient runs through what such a call gave, the variables still hold it, and the statement need not be run
again.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.observe.numbers.func_losses import is_trained
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.source.assignments import names_written, targets_of
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_code import is_user_file

_LIBRARIES = ("torch", "builtins", "math", "functools", "itertools", "operator")


def reusable_result(
    statement: ast.stmt, segment: Iterable[ast.stmt], variables: dict[str, Any]
) -> dict[str, Any] | None:
    """What a statement gave its names, if that can be taken over; None where it must be run again."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return None
    names = _plain_targets(statement)
    if not names or not all(name in variables for name in names):
        return None
    if not any(_is_foreign(callee, variables) for callee in _callees(statement.value)):
        return None
    if any(_has_graph(variables[name]) for name in names) or _changes(segment, names) > len(names):
        return None
    return {name: variables[name] for name in names}


def _plain_targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    flat = [
        part
        for target in targets_of(statement)
        for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return [part.id for part in flat if isinstance(part, ast.Name)] if all(map(_is_name, flat)) else []


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _callees(node: ast.expr) -> Iterator[ast.expr]:
    for part in calls_in(node):
        yield part.func


def _is_foreign(callee: ast.expr, variables: dict[str, Any]) -> bool:
    """Whether a call leaves torch: into a function of the user's, or an object that may change by it."""
    names = [part for part in ast.walk(callee) if not isinstance(part, ast.Name | ast.Attribute | ast.expr_context)]
    if names:
        return False  # the result of another call, which is looked at itself
    try:
        value = eval(compile(ast.Expression(callee), "<callee>", "eval"), dict(variables))
    except Exception:
        return False
    if isinstance(value, FunctionType):
        return is_user_file(value.__code__.co_filename)
    if isinstance(value, MethodType | BuiltinMethodType):
        owner = getattr(value, "__self__", None)
        if isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random"):
            return True
        if isinstance(owner, torch.Tensor | torch.nn.Module | Optimizer | type) or owner is None:
            return False
        return not type(owner).__module__.startswith(_LIBRARIES)
    return False


def _has_graph(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | Optimizer):
        return True
    return any(tensor.requires_grad or is_trained(tensor) for tensor in tensors_in(value))


def _changes(segment: Iterable[ast.stmt], names: list[str]) -> int:
    """How often these names are bound, or what they hold is written to."""
    count = 0
    for statement in segment:
        count += sum(name in names for name in names_written(statement))
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                    count += _root(node) in names
                case ast.Call(func=ast.Attribute(attr=attr, value=owner)) if attr.endswith("_"):
                    count += _root(owner) in names
    return count


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def draws_from_iterator(statement: ast.stmt, namespace: dict[str, Any]) -> bool:
    """Whether a statement is `x = next(iterator)`, alone or in a `try`, so that its result is to be taken over.

    The iterator of a DataLoader is none of these: in a replay it repeats its batch.
    """
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Try):
        return False
    drawn = [argument for node in ast.walk(statement) if (argument := _drawn_from(node)) is not None]
    if not drawn:
        return False
    try:
        iterators = [eval(compile(ast.Expression(node), "<next>", "eval"), namespace) for node in drawn]
    except Exception:
        return False
    bound = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return not any(isinstance(iterator, _BaseDataLoaderIter) for iterator in iterators) and all(
        name in namespace for name in bound
    )


def _drawn_from(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name() | ast.Attribute() as iterator, *_]):
            return iterator
    return None


def bind_batch(namespace: dict[str, Any], target: ast.expr, batch: Any) -> None:
    """Bind the loop's names to the batch anew, where the names that were not changed show that it is this batch."""
    candidates = [target]
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        candidates.append(target.elts[1])  # `for i, batch in enumerate(loader)`
    for candidate in candidates:
        trial: dict[str, Any] = {"__batch__": batch}
        assignment = ast.Assign([candidate], ast.Name("__batch__", ast.Load()))
        module = ast.fix_missing_locations(ast.Module([assignment], []))
        try:
            exec(compile(module, "<batch>", "exec"), trial)
        except Exception:
            continue
        trial.pop("__batch__")
        trial.pop("__builtins__", None)
        same_kind = all(
            namespace.get(name) is value
            or (
                type(namespace.get(name)) is type(value)
                and getattr(namespace.get(name), "shape", None) == getattr(value, "shape", None)
            )
            for name, value in trial.items()
        )
        if trial and same_kind:
            namespace.update(trial)
            return


def is_on_device(taken: dict[str, Any]) -> bool:
    """Whether what could be taken over is on a device: in a shadow its values are gone, so it is made anew."""
    with torch._C.DisableTorchFunction():  # the shadow would answer that it is on the CPU
        return any(tensor.device.type != "cpu" for value in taken.values() for tensor in tensors_in(value))
