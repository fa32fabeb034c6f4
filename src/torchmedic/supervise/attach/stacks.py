"""The Python stacks of several processes in several looks, through py-spy."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.supervise.proc import pyspy

NO_PYSPY = "py-spy is not installed"
_MAX_FAILURES = 2  # failures of py-spy, before it is no longer tried
_PARALLEL_DUMPS = 4


class Stacks:
    """Reads the stacks of all processes at every look."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._looks: dict[int, list[tuple[PyThread, ...]]] = defaultdict(list)
        self._native: dict[int, tuple[str, ...]] = {}
        self._time = 0.0
        self._failures = 0
        self.failure = "" if pyspy.executable() is not None else NO_PYSPY

    def take(self, *, native: bool) -> None:
        if not self._pids or self.failure == NO_PYSPY or self._failures >= _MAX_FAILURES:
            return
        self._time = time.time()
        with ThreadPoolExecutor(_PARALLEL_DUMPS) as pool:
            dumps = list(pool.map(lambda pid: pyspy.dump(pid, native=native), self._pids))
        failures = []
        for pid, dump in zip(self._pids, dumps, strict=True):
            if dump is None or not dump.threads:
                failures.append(dump.failure if dump is not None else "")
                continue
            self._looks[pid].append(tuple(thread for thread in dump.threads if not _is_ours(thread)))
            self._native |= dump.native
        self._failures += not self._looks
        self.failure = "" if self._looks else next(filter(None, failures), "")

    def unseen(self) -> list[int]:
        """The processes that py-spy could not read although it could read others."""
        return [pid for pid in self._pids if pid not in self._looks] if self._looks else []

    def inside(self) -> list[InsideView]:
        return [InsideView(pid=pid, time=self._time, threads=_merged(looks)) for pid, looks in self._looks.items()]

    def with_native(self, view: ProcessView) -> ProcessView:
        if not any(thread.tid in self._native for thread in view.threads):
            return view
        threads = (msgspec.structs.replace(thread, native=self._native.get(thread.tid, ())) for thread in view.threads)
        return msgspec.structs.replace(view, threads=tuple(threads))


def _is_ours(thread: PyThread) -> bool:
    """Whether a thread is torchmedic's listener."""
    return any("torchmedic/observe/inside/" in frame.file for frame in thread.frames)


def _merged(looks: list[tuple[PyThread, ...]]) -> tuple[PyThread, ...]:
    """The last look, with the position of each thread in all looks."""
    samples: dict[int, list[str]] = defaultdict(list)
    lines: dict[int, list[int]] = defaultdict(list)
    for look_ in looks:
        for thread in look_:
            samples[thread.ident].append(" ".join(f"{frame.file}:{frame.line}" for frame in thread.frames))
            own = thread.user_frame
            lines[thread.ident].append(own.line if own is not None else 0)
    keeps = {ident for ident in samples if all(_holds(ident, look_) for look_ in looks)}
    return tuple(
        msgspec.structs.replace(
            thread,
            samples=tuple(samples[thread.ident]),
            lines=tuple(lines[thread.ident]),
            holds_gil=thread.ident in keeps,
        )
        for thread in looks[-1]
    )


def _holds(ident: int, look_: tuple[PyThread, ...]) -> bool:
    return any(thread.ident == ident and thread.holds_gil for thread in look_)
