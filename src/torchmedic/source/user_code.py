"""Whose code is a frame: the user's own, or a library's; its lines, and how its file is named in a report."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import sysconfig
import time
from types import CodeType, FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_BEGAN = time.time()

_known: dict[str, bool] = {}
verdicts = _known  # for those who ask so often that a call would cost too much


def is_user_file(filename: str) -> bool:
    """Whether code of this file belongs to the person who runs the training."""
    verdict = _known.get(filename)
    if verdict is None:
        verdict = _known[filename] = _judge(filename)
    return verdict


def _judge(filename: str) -> bool:
    main = sys.modules.get("__main__")
    if filename == getattr(main, "__file__", None):
        return True  # also a script that lives in site-packages, as with `run -m package.train`
    if filename.startswith("<"):
        # IPython cells are registered in linecache as <ipython-input-...>; the rest is generated code.
        return filename.startswith("<ipython-input")
    path = _real(filename)
    if _is_generated(path) or (filename.endswith((".pyx", ".pxd")) and not os.path.exists(path)):
        return False  # a library in Cython names its files from where it was built
    if path.startswith(PACKAGE) or any(part in path for part in _INSTALLED):
        return path.startswith(os.path.join(PACKAGE, "demos"))
    # A project may sit below the prefix of a Python (a container's /usr); only its library folders are not user code.
    return not path.startswith(_LIBRARIES)


def _real(filename: str) -> str:
    """`os.path.realpath`, but the links of a folder are followed once for all of its thousands of files."""
    if not os.path.isabs(filename) or os.path.islink(filename):
        with contextlib.suppress(FileNotFoundError):  # the working folder has been deleted
            return os.path.realpath(filename)
        return filename
    folder, name = os.path.split(filename)
    return os.path.join(_real_folder(folder), name)


@functools.lru_cache(maxsize=4096)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _is_generated(path: str) -> bool:
    """Whether torch.compile wrote this file, into its cache."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return f"{os.sep}torchinductor_" in path or (folder is not None and path.startswith(os.path.realpath(folder)))


def is_library_file(filename: str) -> bool:
    """Whether code of this file belongs to an installed library other than torch: a Trainer, for example."""
    name = next((filename.rpartition(part)[2] for part in _INSTALLED if part in filename), "")
    return bool(name) and name.partition(os.sep)[0] not in ("torch", "torchmedic") and not is_user_file(filename)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code at or above `frame`."""
    while frame is not None:
        filename = frame.f_code.co_filename
        verdict = _known.get(filename)
        if is_user_file(filename) if verdict is None else verdict:
            return frame
        frame = frame.f_back
    return None


_inner: dict[str, bool] = {}


def _torch_folder() -> str:
    """Asked of a process that has torch; the parent reads this module too, and must never import it."""
    return os.path.dirname(os.path.abspath(str(sys.modules["torch"].__file__))) + os.sep


def outside_torch(frame: FrameType | None) -> FrameType | None:
    """The innermost frame at or above `frame` that is neither torch's nor ours: the user's, or another library's."""
    known = _inner.get
    while frame is not None:
        filename = frame.f_code.co_filename
        verdict = known(filename)
        if verdict is None:
            verdict = _inner[filename] = filename.startswith((_torch_folder(), PACKAGE))
        if not verdict:
            return frame
        frame = frame.f_back
    return None


def source_line(file: str, line: int) -> str:
    """One line without its newline; empty where the source is missing."""
    return linecache.getline(file, line).rstrip("\n")


def has_changed(code: CodeType) -> bool:
    """Whether the file of some code was written after this process had begun, and does not hold that code any more."""
    try:
        if os.stat(code.co_filename).st_mtime <= _BEGAN:
            return False
        whole = compile("".join(linecache.getlines(code.co_filename)), code.co_filename, "exec", dont_inherit=True)
    except OSError:
        return False
    except (SyntaxError, ValueError, RecursionError):
        return True
    pending = [whole]
    for each in pending:  # grows meanwhile
        if each == code and list(each.co_positions()) == list(code.co_positions()):
            return False
        pending += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return True


def relative(file: str) -> str:
    """A path relative to the working directory where it lies below it."""
    if file.startswith("<"):
        return file
    try:
        path = os.path.relpath(file)
    except (ValueError, OSError):
        return file
    return file if path.startswith("..") else path
