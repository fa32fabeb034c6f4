"""What torch's Flight Recorder gives: dumps of several backends, and calls from a thread that has no Python."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from torchmedic.observe.ranks.flight_recorder import _call, _entries, _is_ours, entries_of, with_lines_of_backward
from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, Collective

# As torch 2.11 gave it on an H200, for a job of one rank on NCCL; a bucket of DistributedDataParallel.
BUCKET: dict[str, Any] = {
    "frames": [],
    "record_id": 19,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "thread_name": "pt_autograd_0",
    "thread_id": "140140395910848",
    "collective_seq_id": 20,
    "p2p_seq_id": 0,
    "op_id": 20,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1794820290123996272,
    "input_sizes": [[9352]],
    "input_dtypes": ["Float"],
    "output_sizes": [[9352]],
    "output_dtypes": ["Float"],
    "state": "completed",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": 1794820290126064808,
    "retired": False,
    "timeout_ms": 600000,
    "is_p2p": False,
}
EMPTY = {"version": "2.10", "pg_config": {}, "comm_lib_version": "", "pg_status": {}}
NCCL = {**EMPTY, "comm_lib_version": "2.28.9", "entries": [BUCKET]}


def test_nccl_is_read_where_the_first_dump_is_empty() -> None:
    assert entries_of(map(pickle.dumps, [EMPTY, NCCL])) == [BUCKET]
    assert entries_of([pickle.dumps(EMPTY)]) is None


def test_torch_is_not_asked_before_it_has_imported_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """To name lines, torch would import it in the thread that asks; an import of the main thread would fail then."""
    monkeypatch.delitem(vars(torch), "_inductor", raising=False)
    assert _entries() is None
    assert "_inductor" not in vars(torch)


def test_a_call_in_both_dumps_counts_once() -> None:
    assert entries_of(map(pickle.dumps, [NCCL, NCCL])) == [BUCKET]


def test_a_bucket_of_nccl() -> None:
    call = _call(BUCKET)
    assert (call.op, call.group, call.shapes, call.dtypes) == ("all_reduce", "0", ((9352,),), ("float32",))
    assert (call.native, call.frames, round(call.time, 3)) == (True, (), 1794820290.124)


def test_a_bucket_without_lines_gets_those_of_its_backward() -> None:
    """On a GPU, backward runs in a thread of torch's own."""
    frames = (StackFrame(file="train.py", line=17, function="train"),)
    before = Collective(op="barrier", native=True, time=0.5)
    mark = Collective(op=BACKWARD, frames=frames, time=1.0)
    bucket = Collective(op="all_reduce", native=True, time=2.0)
    assert [call.frames for call in with_lines_of_backward([before, mark, bucket])] == [(), frames, frames]


def test_calls_from_python_are_known_by_our_wrapper_and_backward_is_not_taken_for_one() -> None:
    own = {"filename": "/x/torchmedic/observe/ranks/recorder.py", "line": 1}
    assert _is_ours({"frames": [{**own, "name": "collective"}]})
    assert not _is_ours({"frames": [{**own, "name": "_engine_run_backward"}]})
