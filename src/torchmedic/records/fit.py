"""What `torchmedic fit` predicts, and the course of memory that it predicts from. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "batch",
    "activations",
    "temporaries of backward",
    "temporaries of the optimizer",
    "workspaces of cuBLAS",
    "other tensors",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Line(msgspec.Struct, frozen=True):
    """A line of source; `module` is the class of the layer that was running."""

    file: str
    line: int
    module: str = ""


NOWHERE = Line("", 0)


class Trace(msgspec.Struct):
    """The course of device memory through the first steps of a training script.

    Attributes:
        events: Births and deaths in order: the number of a storage, or its complement (`~number`) where it is freed.
        sizes: Bytes requested, by number.
        kinds: Index into `KINDS`, by number.
        places: Index into `lines` of the line that allocates, by number: the innermost outside torch.
        user_places: Index into `lines` of the innermost line of the user, by number.
        widths: Length of the last dimension, by number; 0 unless the storage is large.
        lines: Lines of source.
        steps: How many updates of the weights there were.
        batch: Shapes of the tensors that were copied to the device in the last step, with their counts of elements.
        classes: Bytes of the parameters of all layers of a class, for classes with several layers.
        loader_sizes: Batch sizes of the DataLoaders.
        seconds: Estimated time of one step on the card.
        update_seconds: The part of it that the optimizer takes.
        backward_line: The line of the user that calls backward.
        changed_line: The line of the user that calls a checkpointed layer, in a run with checkpoints.
        optimizers: Class name of each optimizer, and where it is made.
        autocast: Whether some result was in half precision.
        notes: What the prediction assumes.
        error: Why the script could not be followed; empty if it could.
    """

    events: list[int] = msgspec.field(default_factory=list)
    sizes: list[int] = msgspec.field(default_factory=list)
    kinds: list[int] = msgspec.field(default_factory=list)
    places: list[int] = msgspec.field(default_factory=list)
    user_places: list[int] = msgspec.field(default_factory=list)
    widths: list[int] = msgspec.field(default_factory=list)
    lines: list[Line] = msgspec.field(default_factory=list)
    steps: int = 0
    batch: list[tuple[int, ...]] = msgspec.field(default_factory=list)
    classes: dict[str, int] = msgspec.field(default_factory=dict)
    loader_sizes: list[int] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    update_seconds: float = 0.0
    backward_line: Line = NOWHERE
    changed_line: Line = NOWHERE
    optimizers: list[tuple[str, Line]] = msgspec.field(default_factory=list)
    autocast: bool = False
    notes: list[str] = msgspec.field(default_factory=list)
    error: str = ""


class Row(msgspec.Struct, frozen=True):
    """What holds memory at the peak."""

    kind: str
    nbytes: int
    line: Line = NOWHERE
    count: int = 1


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a training step needs, and whether a card has it.

    `allocated` and `reserved` are what `torch.cuda.max_memory_allocated` and `max_memory_reserved` would report.
    `reserved` does not include the context.
    """

    allocated: int
    reserved: int
    context: int
    fits: bool
    retries: int = 0  # how often the allocator must give its cache back to make room

    @property
    def total(self) -> int:
        return self.reserved + self.context


class Edit(msgspec.Struct, frozen=True):
    """A line to change. `replacement` is the new line; empty if the change is more than one line."""

    line: Line
    replacement: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the script, with the memory and the time of a step that it leads to.

    `estimate` is true if memory was not counted on a run of the changed script. `exact` is false if the change alters
    the results of training beyond rounding.
    """

    title: str
    need: Need
    seconds: float
    how: str = ""
    edits: tuple[Edit, ...] = ()
    estimate: bool = False
    exact: bool = True


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch that fits. `size` is None if it is not known, and `why` says why."""

    current: int | None = None
    size: int | None = None
    need: Need | None = None
    line: Line = NOWHERE
    why: str = ""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `torchmedic fit`."""

    card: str
    memory: int | None
    need: Need
    phase: str
    line: Line
    rows: tuple[Row, ...]
    seconds: float
    batch: Batch = Batch()
    plans: tuple[Plan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.need.fits


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that predicts is asked. `memory` and `card` are as on the command line."""

    script: str
    arguments: tuple[str, ...] = ()
    folder: str
    memory: int | None = None
    card: str = ""
    plans: bool = True
    seconds: float = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction, or the one line that says why there is none."""

    prediction: Prediction | None = None
    error: str = ""
