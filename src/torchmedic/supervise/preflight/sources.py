"""The syntax trees of a script and of the modules beside it that it imports."""

from __future__ import annotations

import ast
import tokenize
import warnings
from pathlib import Path

import msgspec

from torchmedic.errors import UsageError
from torchmedic.source.imports import imported_files
from torchmedic.source.user_code import relative

_MAX_FILES = 60
_MAX_FILE_BYTES = 4 << 20  # a larger file was not written by a person


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `name` is its path as the user would write it."""

    path: Path
    name: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """The place of a node, such as `train.py:12`."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"


def read_script(script: Path) -> list[Source]:
    """The script, followed by the modules that it imports from its own folder, directly or indirectly.

    Raises:
        UsageError: The script does not exist, or is not Python.
    """
    if not script.exists():
        raise UsageError(f"cannot find the script {script}")
    if (script / "__main__.py").is_file():
        script = script / "__main__.py"
    if not script.is_file():
        raise UsageError(f"cannot read {script}: it is not a script")
    if script.suffix == ".ipynb":  # its JSON happens to be valid Python
        raise UsageError(f"cannot read {script}: it is a notebook; save its code as a script first")
    try:
        tree = _parsed(script)
    except SyntaxError as error:
        place = f"{script}:{error.lineno}" if error.lineno else str(script)
        raise UsageError(f"cannot read {place}: {error.msg or 'it is not Python'}") from None
    except (ValueError, RecursionError, MemoryError):
        raise UsageError(f"cannot read {script}: it is not Python") from None
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    found = [Source(path=script, name=str(script), tree=tree)]
    seen = {script.resolve()}
    folder = script.resolve().parent
    for source in found:  # the list grows in the loop
        for path in imported_files(source.tree, source.path.resolve(), folder):
            if path.resolve() not in seen and len(found) < _MAX_FILES:
                seen.add(path.resolve())
                try:
                    found.append(Source(path=path, name=relative(str(path)), tree=_parsed(path)))
                except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
                    continue  # it may be imported conditionally
    return found


def _parsed(path: Path) -> ast.Module:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError("too large")
    with tokenize.open(path) as file:  # in the encoding that the file declares
        text = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as for "\d" in a plain string
        return ast.parse(text)
