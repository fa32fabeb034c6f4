"""Batches of a replay: loop variables bound to the kept batch, and iterators that no replay can set back."""

from __future__ import annotations

import ast
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


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
