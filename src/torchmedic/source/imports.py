"""The files of the modules that a file imports, as far as they lie beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchmedic.source.syntax import syntax_tree

_MAX_FILES = 64
_MAX_PARENTS = 3  # folders above a file from which it may import


def imported_files(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    """Files of modules that a file imports from a folder, or from its own package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else path.parents[max(node.level - 1, 0)]
            module = node.module or ""
            yield from _files(base, module)
            for alias in node.names:
                yield from _files(base, f"{module}.{alias.name}" if module else alias.name)


def files_behind(files: Iterable[str]) -> list[str]:
    """These files and what they import, directly or not."""
    found = [*dict.fromkeys(files)]
    for file in found:  # the list grows in the loop
        path, tree = Path(file), syntax_tree(file)
        for folder in [*path.parents][:_MAX_PARENTS] if tree is not None else ():
            beside = map(str, imported_files(tree, path, folder)) if tree is not None else ()
            found += [each for each in dict.fromkeys(beside) if each not in found][: _MAX_FILES - len(found)]
    return found


def _files(base: Path, module: str) -> Iterator[Path]:
    path = base.joinpath(*module.split(".")) if module else base
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if module and candidate.is_file():
            yield candidate
