"""Start the agent when torch is first imported.

`torchmedic run` puts this folder first on PYTHONPATH, so that every Python child imports this file at start-up.
It must cost nothing where torch is never imported, leave `sys.path` and a `sitecustomize` of the user's own as
they would have been, and never raise. It knows nothing of the rest of torchmedic until torch is there.
"""

import gc
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain():
    """Give way to the sitecustomize that would have been imported without us, if there is one."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import system insists that a module which it has just run is still registered.
        sys.modules.setdefault("sitecustomize", ours)


class _TorchLoader:
    """The real loader of torch, and the agent after it."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            # Without this frame: torch cannot be imported, and the traceback is that of an import without us.
            error.__traceback__ = error.__traceback__.tb_next
            raise
        _start_agent()


class _TorchFinder:
    """A finder that waits for torch, and steps aside for good once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        # Also asked by those who only want to know whether torch is there, so it answers as often as it is asked.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TorchLoader(spec.loader)
                return spec
        return None


_FINDER = _TorchFinder()


def _start_agent():
    appended = [home for home in _HOMES if home not in sys.path]
    sys.path += appended
    # Without this, our imports would start a collection of all of torch's objects, which takes a tenth of a second.
    collects = gc.isenabled()
    gc.disable()
    try:
        if _is_shadowed():
            _load_own_imports().import_agent(_PATH, _HOMES).install(_RUN_DIR)
        else:
            from torchmedic.integrations.telling import install

            install(_RUN_DIR)
    except Exception as error:
        hidden = os.path.exists(os.path.join(_RUN_DIR, ".confidential"))
        reason = type(error).__name__ + ("" if hidden else f": {ascii(str(error))[1:-1]}")
        sys.stderr.write(f"torchmedic: not watching this process ({reason})\n")
    finally:
        if collects:
            gc.enable()
        for home in appended:
            if home in sys.path:
                sys.path.remove(home)
        if appended:
            sys.meta_path.append(_LateFinder(appended))


class _LateFinder:
    """Finds what torchmedic imports later, where it is in an environment of its own: for nobody else."""

    def __init__(self, homes):
        self._homes = homes

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if path is not None or frame is None:
            return None
        if not any(frame.f_code.co_filename.startswith(os.path.join(home, "")) for home in self._homes):
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, self._homes)


def _is_shadowed():
    """Whether a file of the user's, such as `json.py` beside the script, has the name of a module that we import."""
    names = (*sys.stdlib_module_names, *_PACKAGES)
    for entry in sys.path:
        if entry in _PATH or entry in _HOMES:
            continue
        found = _names_in(entry)
        if any(f"{name}.py" in found or f"{name}.so" in found or _is_package(entry, name, found) for name in names):
            return True
    return False


def _names_in(folder):
    """The names in a folder; Python has listed it already, in search of torch."""
    found = getattr(sys.path_importer_cache.get(folder), "_path_cache", None)
    if found:
        return found
    try:
        return frozenset(os.listdir(folder or os.curdir))
    except OSError:
        return ()


def _is_package(folder, name, found):
    return name in found and os.path.exists(os.path.join(folder, name, "__init__.py"))


def _load_own_imports():
    import importlib.util

    spec = importlib.util.spec_from_file_location("torchmedic_own_imports", os.path.join(_HERE, "own_imports.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _absolute(entry):
    try:
        return os.path.abspath(entry)
    except OSError:  # the working folder is gone
        return entry


def _hide(variables):
    """Let `os.environ` read as the user left it; children still inherit ours through the C environment."""
    data = getattr(os.environ, "_data", None)
    if data is None or os.name != "posix":
        return
    for name, value in variables.items():
        key = os.environ.encodekey(name)
        if value is None:
            data.pop(key, None)
        else:
            data[key] = os.environ.encodevalue(value)


_RUN_DIR = os.environ.get("TORCHMEDIC_RUN_DIR")
# The folder of torchmedic, and those of its dependencies.
_HOMES = [home for home in os.environ.get("TORCHMEDIC_HOME", "").split(os.pathsep) if home]
_PACKAGES = ("torchmedic", "msgspec", "psutil", "rich", "safetensors")


def _is_ours(entry):
    try:
        return bool(entry) and os.path.abspath(entry) == _HERE
    except OSError:  # the working folder has been deleted
        return False


sys.path[:] = [entry for entry in sys.path if not _is_ours(entry)]

# The search path without anything of the user's: Python has not added the script's folder yet.
_GIVEN = {_absolute(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
_PATH = [entry for entry in sys.path if os.path.isabs(entry) and (entry not in _GIVEN or entry in _HOMES)]

if _RUN_DIR:
    if os.environ.get("TORCHMEDIC_HIDE"):
        _rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not _is_ours(entry)]
        _hide(
            {
                "TORCHMEDIC_RUN_DIR": None,
                "TORCHMEDIC_HOME": None,
                "TORCHMEDIC_HIDE": None,
                "PYTHONPATH": os.pathsep.join(_rest) if any(_rest) else None,
            }
        )
    sys.meta_path.insert(0, _FINDER)

_chain()
