"""The variables of the user's code, by name: of the functions that run, and of the modules that were imported.

Before Python 3.13 there is one dict of locals per frame: whoever reads `frame.f_locals` fills it anew, and what
`locals()` has given to the function changes with it. So functions that look at their own variables are left alone.
"""

from __future__ import annotations

import ast
import dis
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

from torchmedic.source.syntax import syntax_tree
from torchmedic.source.user_code import is_user_file, verdicts

PLAIN: frozenset[type] = frozenset({int, float, bool, complex, type(None), range, slice})
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib")} | {_OURS + os.sep}
)
_READING = frozenset({"locals", "vars", "dir", "exec"})
_known: dict[int, tuple[CodeType, bool]] = {}
_MAX_FUNCTIONS = 2000  # that are remembered


def roots(frame: FrameType | None) -> Iterator[tuple[str, int, str, Any]]:
    """The variables of the user's frames, the innermost first, and of the user's modules."""
    modules: set[int] = set()
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            if code.co_flags & inspect.CO_OPTIMIZED:
                others = code.co_freevars
                for name, value in locals_of(frame):
                    line = _owner(name, frame) if name in others else code.co_firstlineno
                    yield code.co_filename, line, name, value
            if id(frame.f_globals) not in modules:
                modules.add(id(frame.f_globals))
                yield from _globals(code.co_filename, frame.f_globals)
        frame = frame.f_back
    for file, variables in user_modules():
        if id(variables) not in modules:
            yield from _globals(file, variables)


def _owner(name: str, frame: FrameType) -> int:
    """The first line of the running function whose variable another one uses; 0 if it has returned."""
    file, outer = frame.f_code.co_filename, frame.f_back
    while outer is not None:
        if name in outer.f_code.co_cellvars and outer.f_code.co_filename == file:
            return outer.f_code.co_firstlineno
        outer = outer.f_back
    return 0


def _globals(file: str, variables: dict[str, Any]) -> Iterator[tuple[str, int, str, Any]]:
    for name, value in list(variables.items()):
        if not name.startswith("__") and type(value) not in PLAIN and not issubclass(type(value), ModuleType):
            yield file, 0, name, value


_modules: tuple[int, list[tuple[str, dict[str, Any]]]] = (0, [])


def user_modules() -> list[tuple[str, dict[str, Any]]]:
    """The files and variables of the user's own modules; looked for again only after an import."""
    global _modules
    if _modules[0] != len(sys.modules):
        found = [
            (file, vars(module))
            for module in list(sys.modules.values())
            if issubclass(type(module), ModuleType)
            and isinstance(file := module.__dict__.get("__file__"), str)
            and not file.startswith(_LIBRARIES)  # nearly all: to ask closely takes long
            and is_user_file(file)
        ]
        _modules = (len(sys.modules), found)
    return _modules[1]


def user_files() -> list[str]:
    return [file for file, _ in user_modules()]


def loaded_files() -> list[str]:
    """The files of the user's that are loaded, each once; also a script that lives in site-packages."""
    modules = [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]
    files = [module.__dict__.get("__file__") for module in modules]
    if getattr(sys.modules.get("__main__"), "__file__", None) is None:
        # At the end of a script, Python takes the name of its file away; the hooks have seen it.
        files += [file for file, is_users in list(verdicts.items()) if is_users and not file.startswith("<")]
    return list(dict.fromkeys(file for file in files if isinstance(file, str) and is_user_file(file)))


def user_trees() -> Iterator[tuple[str, ast.Module]]:
    """The files of the user's that are loaded, with their syntax."""
    for file in loaded_files():
        if (tree := syntax_tree(file)) is not None:
            yield file, tree


def locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a function that runs; none where reading them would be seen by the user."""
    optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    old = sys.version_info < (3, 13)
    if old and optimized and (sys.gettrace() or looks_at_locals(frame.f_code)):
        return []  # there is one dict of locals per frame
    values = frame.f_locals
    found = list(values.items())
    if old and optimized:
        values.clear()  # else it would hold every local past its time
    return found


def looks_at_locals(code: CodeType) -> bool:
    """Whether it may call `locals`, `vars`, `dir`, `exec` or the function `eval`; `model.eval()` is none of these."""
    names = code.co_names
    if not _READING.isdisjoint(names):
        return True
    if "eval" not in names:
        return False
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= _MAX_FUNCTIONS:
            _known.clear()
        loaded = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        found = _known[id(code)] = (code, "eval" in loaded)
    return found[1]
