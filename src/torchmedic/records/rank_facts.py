"""What each rank of a job tells of its training, so that the ranks can be compared.

Like all records, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

import msgspec

from torchmedic.records.ranks import RankLog
from torchmedic.records.report import Moment, StackFrame


class WeightSample(msgspec.Struct, frozen=True, kw_only=True):
    """The size of some weights after a number of updates: for each, the sum of the absolute values of a sample.

    `rates` are the learning rates of the optimizer at that moment, `past_rates` is the sum of those that each step of a
    scheduler has found or set before, `exchanges` is how many forwards of a DistributedDataParallel there were before,
    each of which makes the ranks exchange gradients.
    """

    updates: int
    sizes: tuple[float, ...]
    rates: tuple[float, ...] = ()
    past_rates: float = 0.0
    exchanges: int = 0


class TrainedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of one optimizer, where a script has several.

    `updating` is the line of its first update, `turns` its share of the first updates. `shapes` are those of a few
    weights, `start` and `last` their sizes before its first update and at the last sample. `nbytes` is how large all
    gradients are. `is_wrapped` is that some of the weights are in a DistributedDataParallel.
    """

    updating: StackFrame | None
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    is_wrapped: bool
    start: tuple[float, ...]
    last: tuple[float, ...] = ()
    turns: int = 0


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells of its training, to be compared with the other ranks.

    `batches` are fingerprints of the first batches that were trained on, `items` the first items of the dataset in
    them, `sampler` what drew them, `loading` the line that asked for them, `stream` the beginning of the `__iter__` of
    an IterableDataset that they come from. `same_order` is how many passes over the
    data had the order of an earlier one. `weights` are samples of the weights in `names`, whose shapes are `shapes`;
    those in `added` came into the model after it was wrapped. `thawed` is trained, and was frozen then; `written` is
    frozen, and its values have changed. `calling` is
    the line that called a model before the first update, `updating` that of the update, `scheduling` that of the first
    step of a scheduler. `wrapper` is "DistributedDataParallel" if such a module was made at `wrapped_at`, `forwards` is
    1 once it was called for training, `is_apart` is that the ranks may differ on purpose: a hook of the user exchanges
    gradients, or `Join` lets ranks make different numbers of updates. `parameters` are the names of its first
    parameters, in their order. `syncs` is how many times the gradients are exchanged for one update, `nbytes` how large
    they are. `unawaited` is the line of an exchange of a gradient that was not complete when the weights were updated,
    `early` are the lines of an exchange of a gradient before the backward that computes it, with none after it,
    `unsynced` are the lines of a forward under `no_sync` that was the last one before an update, innermost first.
    `into_one` is the line of a gather that writes the parts of all ranks into one and the same tensor.
    `device` identifies the GPU of the weights, `devices` is how many GPUs the process can see. `models` are the weights
    by optimizer, where there are several, as of the last sample in `weights`.
    """

    rank: int
    pid: int
    world_size: int
    host: str = ""
    batches: tuple[str, ...] = ()
    items: tuple[int, ...] = ()
    sampler: str = ""
    loading: StackFrame | None = None
    stream: StackFrame | None = None
    same_order: int = 0
    names: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    thawed: str = ""
    written: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    weights: tuple[WeightSample, ...] = ()
    calling: StackFrame | None = None
    updating: StackFrame | None = None
    scheduling: StackFrame | None = None
    wrapper: str = ""
    wrapped_at: StackFrame | None = None
    forwards: int = 0
    is_apart: bool = False
    parameters: tuple[str, ...] = ()
    syncs: int = 0
    nbytes: int = 0
    unawaited: StackFrame | None = None
    early: tuple[StackFrame, ...] = ()
    unsynced: tuple[StackFrame, ...] = ()
    into_one: StackFrame | None = None
    device: str = ""
    devices: int = 0
    models: tuple[TrainedModel, ...] = ()


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a job tell of their training, by rank, and the collectives that they called.

    `logs` is complete only after the end of the run. `ended` is whether it has come. `moments` are the entries of the
    black box of each rank.
    """

    ranks: tuple[RankFacts, ...]
    logs: tuple[RankLog, ...] = ()
    moments: dict[int, tuple[Moment, ...]] = {}
    ended: bool = False

    @property
    def step_number(self) -> int | None:
        return None

    @property
    def rank(self) -> int:
        return 0
