"""What the nodes of the live graphs have saved for backward: tensors that no variable need hold.

Read without running anything of the user's: a saved tensor that a hook has packed (a checkpoint, `save_on_cpu`) is not
unpacked, as that would compute or copy; what it was packed into is looked at instead. For a `torch.autograd.Function`
of the user's, the line to look at is the one that saves: the function may be applied at many places.
"""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.source.objects.graph import following, name_of
from torchmedic.source.spots import Spot, spot_of_node
from torchmedic.source.syntax import calls_in, function_of, syntax_tree
from torchmedic.source.user_code import is_user_file

_RAW = "_raw_saved_"
_known: dict[type, tuple[str, ...]] = {}
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"})
_MAX_NEAR_NODES = 48  # that are searched for weights


class _Refusing(TorchDispatchMode):
    """Stops every computation: reading saved tensors must compute nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # of an operation that has saved what it made: no memory, no work
            return func(*args, **(kwargs or {}))
        raise RuntimeError("a saved tensor was packed by a hook")


def tensors_saved_by(node: Any) -> list[torch.Tensor]:
    """The tensors that one node keeps alive; none where a backward has been through it."""
    found: list[torch.Tensor] = []
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
        except (RuntimeError, AttributeError):
            continue
        for each in raw if isinstance(raw, tuple | list) else (raw,):
            found += _inside(_content(node, name, each))
    context = getattr(node, "__dict__", None)  # of a Function of the user's: `ctx.x = x` keeps it too
    if isinstance(context, dict):
        for value in context.values():
            found += _inside(value)
    return found


def sequence_of(node: Any) -> int:
    """The sequence number of a node within its thread; -1 if the node has none."""
    try:
        return int(node._sequence_nr())
    except (AttributeError, RuntimeError, TypeError):
        return -1


def weights_of(node: Any) -> tuple[int, ...]:
    """The identities of the parameters that a node collects gradients for, also turned round or cast on the way."""
    found = []
    for after in following(node):
        way = after
        for _ in range(3):
            if way is None or name_of(way) not in _VIEWS:
                break
            way = way.next_functions[0][0]
        if way is not None and hasattr(way, "variable"):
            found.append(id(way.variable))
    return tuple(found)


def leaves_of(node: Any) -> list[torch.Tensor]:
    """The leaves whose gradients a node computes by itself."""
    found = [getattr(after, "variable", None) for after in following(node)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def weights_before(node: Any) -> tuple[int, ...]:
    """The identities of the parameters at the nearest nodes behind this one that have any."""
    found: list[int] = []
    pending, seen = [node], {node}
    while pending and len(seen) < _MAX_NEAR_NODES:
        each = pending.pop(0)
        weights = weights_of(each)
        found += weights
        if not weights:
            behind = following(each)
            pending += [after for after in behind if after not in seen]
            seen.update(behind)
    return tuple(found)


def _raw_names(kind: type) -> tuple[str, ...]:
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
    return found


def _content(node: Any, name: str, raw: Any) -> Any:
    if raw is None:
        return None
    try:
        return raw.data  # as it is kept: the tensor, or what a hook has made of it
    except AttributeError:
        pass  # torch before it could say
    except (RuntimeError, TypeError):
        return None
    try:
        with _Refusing():  # type: ignore[no-untyped-call]
            return getattr(node, name.replace(_RAW, "_saved_") if name != "_raw_saved_tensors" else "saved_tensors")
    except Exception:
        return None


def _inside(value: Any, depth: int = 2) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth and isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _inside(item, depth - 1)]
    return []


def applied_class(node: Any) -> type | None:
    """The class whose `apply` has made a node; None for those of torch itself."""
    found = getattr(type(node), "_forward_cls", None)
    return found if isinstance(found, type) else None


def applied_in(variables: dict[str, Any]) -> type | None:
    """The class that is being applied, by the variables of `Function.apply`."""
    kind = variables.get("cls")
    return kind if isinstance(kind, type) and issubclass(kind, torch.autograd.Function) else None


@functools.cache
def saving_line(kind: type) -> Spot | None:
    """The only statement of a Function's class that saves; None for several, and for a class of a library."""
    for name in ("setup_context", "forward"):
        methods: list[Any] = [base.__dict__[name] for base in kind.__mro__ if name in base.__dict__]
        codes = [getattr(inspect.unwrap(getattr(each, "__func__", each)), "__code__", None) for each in methods]
        code = next((each for each in codes if each is not None and is_user_file(each.co_filename)), None)
        function = function_of(syntax_tree(code.co_filename), code) if code is not None else None
        saving = _saving(function) if function is not None and function.args.args else None
        if code is not None and saving is not None:
            return spot_of_node(code.co_filename, saving, name)
    return None


def _saving(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | ast.stmt | None:
    context = function.args.args[0].arg
    calls = [
        each for each in calls_in(function) if ast.unparse(each.func) == f"{context}.save_for_backward" and each.args
    ]
    return _attribute(function, context) if not calls else calls[0] if len(calls) == 1 else None


def _attribute(function: ast.AST, context: str) -> ast.stmt | None:
    """`ctx.x = x`, where it is the only one that is no plain number or text."""
    kept: list[ast.stmt] = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Assign)
        and not isinstance(each.value, ast.Constant)
        and any(isinstance(part, ast.Attribute) and ast.unparse(part.value) == context for part in each.targets)
    ]
    return kept[0] if len(kept) == 1 else None
