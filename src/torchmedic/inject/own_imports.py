"""The imports of torchmedic's own code where files of the user's have the names of its modules.

`json.py` beside a script is the script's module: the script must get it, and torchmedic must get the module of the
standard library. So both may be loaded, and `sys.modules` holds the user's. An import statement in torchmedic's code
puts its own modules and search path in place, and takes them away again. This file is used only where there is such a
file; it imports nothing of torchmedic, because it decides which one is imported.
"""

import _thread
import builtins
import contextlib
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

_NAME = "torchmedic"


def import_agent(path, homes):
    """Import torchmedic from a search path without the user's folders, and return what installs the agent."""
    own = _OwnImports([*path, *(home for home in homes if home not in path)])
    return own("torchmedic.integrations.telling", fromlist=("install",))


class _OwnImports:
    """Replaces `__import__` in the modules of torchmedic."""

    def __init__(self, path):
        self._path = path
        self._modules = {}  # ours, where the user has or may load another module of that name
        self._lock = _thread.RLock()
        self._depth = 0
        self._builtins = {**builtins.__dict__, "__import__": self}

    def __call__(self, name, globals=None, locals=None, fromlist=(), level=0):
        with self._in_place():
            return builtins.__import__(name, globals, locals, fromlist, level)

    def find_spec(self, name, path=None, target=None):
        """Find the modules of torchmedic, so that their import statements come here."""
        if name.partition(".")[0] != _NAME:
            return None
        spec = PathFinder.find_spec(name, self._path if path is None else path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.builtins = self._builtins
        return spec

    @contextlib.contextmanager
    def _in_place(self):
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            path, theirs = sys.path[:], self._take_theirs()
            sys.modules.update(self._modules)
            sys.path[:] = self._path
            sys.meta_path.insert(0, self)
            before = set(sys.modules)
            try:
                yield
            finally:
                sys.meta_path.remove(self)
                sys.path[:] = path
                self._depth -= 1
                self._give_back(theirs, path, before)

    def _take_theirs(self):
        """Remove the user's modules that have the name of a module on our path."""
        theirs = {}
        for name in sorted(sys.modules):  # a package comes before what is in it
            top = name.partition(".")[0]
            if (top in theirs or (name == top and PathFinder.find_spec(name, self._path))) and not self._is_ours(name):
                theirs[name] = sys.modules.pop(name)
        return theirs

    def _is_ours(self, name):
        """Whether a loaded module lies on our path."""
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if not isinstance(origin, str) or not os.path.isabs(origin):
            return True  # built in, frozen, or the main program
        folder, top = os.path.dirname(origin), name.partition(".")[0]
        return folder in self._path or any(origin.startswith(os.path.join(entry, top, "")) for entry in self._path)

    def _give_back(self, theirs, path, before):
        """Put the user's modules back, and take ours away where the user's search path has another one."""
        users = [entry for entry in path if entry not in self._path]
        for name in [each for each in sys.modules if each not in before or each in self._modules]:
            top = name.partition(".")[0]
            shadowed = top in theirs or PathFinder.find_spec(top, users) is not None
            if shadowed and (name == top or name in theirs):
                self._modules[name] = sys.modules.pop(name)
        sys.modules.update(theirs)


class _Loader(SourceFileLoader):
    """Loads a module whose import statements use another `__import__`."""

    builtins = builtins.__dict__

    def exec_module(self, module):
        module.__dict__["__builtins__"] = self.builtins
        super().exec_module(module)
