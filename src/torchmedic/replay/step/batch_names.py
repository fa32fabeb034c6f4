"""The names of a loop over batches, bound to the batch that the loader gave."""

from __future__ import annotations

import ast
from typing import Any


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
