"""A checkpoint is being written; the run is not hung.

What: the main thread is inside `torch.save`, safetensors, pickle or a similar function, and the file grows.

Why: large models, an optimizer that doubles or triples their size, slow or shared storage.

Cure: wait; the diagnosis shows the size, the rate and, if they are known, the remaining bytes. Save less often or in
another thread (`torch.distributed.checkpoint.async_save`), and to a local disk first.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import caller_of, demand, native
from torchmedic.diagnose.words.format import duration, size
from torchmedic.diagnose.words.stall import BUSY, at, stall_rule
from torchmedic.records.inside import PyFrame, PyThread
from torchmedic.records.process import FileGrowth
from torchmedic.records.stall import Stall
from torchmedic.source.user_code import relative

_SAVERS = (
    ("torch/serialization.py", ("save", "_save", "_legacy_save")),
    ("/safetensors/", ("save_file", "save", "save_model")),
    ("torch/distributed/checkpoint/", ("save", "async_save", "save_state_dict", "write_data")),
    ("/numpy/lib/", ("save", "savez", "savez_compressed", "_savez")),
    ("/joblib/", ("dump",)),
    ("/h5py/", ("create_dataset", "__setitem__")),
)
_CALLS = re.compile(r"\b(pickle|dill|cloudpickle|joblib|marshal|shelve|np|numpy|torch|json)\.(dump|save\w*)\(")
_MIN_BYTES_PER_SECOND = 1 << 20  # bytes a second: a log does not grow like this
_MIN_FILE_BYTES = 8 << 20
_MIN_SHARE_WRITTEN = 0.05  # of the state: before that the rate says little


@stall_rule("TM554", "saving-checkpoint")
def check(stall: Stall) -> Draft | None:
    main, view = stall.thread, stall.view
    if main is None or view is None:
        return None
    call = _saver(main)
    file = view.growing[0] if view.growing else None
    moves = file is not None or (view.bytes_written or 0.0) > _MIN_BYTES_PER_SECOND or demand(native(view, main)) > BUSY
    by_file = file is not None and file.rate > _MIN_BYTES_PER_SECOND and file.size > _MIN_FILE_BYTES
    if not moves or (call is None and not by_file):
        return None
    where = f" to {relative(file.path)}" if file is not None else ""
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: a checkpoint is being written{where}, for {duration(stall.still)} so far"
    draft.cause = (
        "the main thread saves, and what it writes grows" if file is not None else "the main thread is at work on it"
    )
    draft.at(at(call or main.user_frame, "cause", "it is saved here"))
    state = stall.inner.state_bytes if stall.inner is not None else None
    if file is not None:
        draft.because(f"{size(file.size)} written, {size(int(file.rate))} a second{_left(file, state)}")
    elif view.bytes_written:
        draft.because(f"{size(int(view.bytes_written))} a second are written")
    draft.help("wait; save less often, to a local disk first, or in another thread")
    return draft.rated("note")


def _left(file: FileGrowth, state: int | None) -> str:
    if state is None or state <= file.size or file.rate <= 0:
        return ""
    if file.size < _MIN_SHARE_WRITTEN * state:
        return f"; {size(state)} are to be saved"  # too early to tell how fast
    return f"; {size(state)} are to be saved, about {duration((state - file.size) / file.rate)} more"


def _saver(main: PyThread) -> PyFrame | None:
    """The user's line that saves."""
    for frame in main.frames:
        if any(part in frame.file and frame.function in functions for part, functions in _SAVERS):
            return caller_of(main, frame)
        if frame.user and _CALLS.search(frame.code):
            return frame
    return None
