"""Mistakes in the loop, as the ledger shows them: one record per mistake, called like the rule that explains it."""

from __future__ import annotations

import msgspec

from torchmedic.observe.device.device_waits import Waited
from torchmedic.observe.heap.walk import Held
from torchmedic.observe.loop.loads import Unmatched
from torchmedic.source.spots import Place


class LoopIncident(msgspec.Struct, frozen=True, kw_only=True):
    """What every mistake has: the step in which it was found, and `cause`, the line to change or to look at.

    `optimizer` is the number of the optimizer in the ledger, 0 for none. Other fields of type `Place` are lines that
    belong to the mistake; `update` is the call of `optimizer.step()`.
    """

    step: int
    cause: Place
    optimizer: int = 0


class GradientsNeverCleared(LoopIncident, frozen=True, kw_only=True):
    """`norms` are the first and the last norm of the witness before backward, where it should be 0.

    `cleared` is where they were cleared before these updates, as once per epoch; None where that was not seen.
    """

    backward: Place
    updates: int
    norms: tuple[float, float]
    in_closure: bool = False  # the optimizer calls backward
    cleared: Place | None = None
    accumulates: bool = False  # an update uses several calls of backward
    is_by_hand: bool = False  # there is no optimizer


class GradientsClearedInsideAccumulation(LoopIncident, frozen=True, kw_only=True):
    """`lost` of the `lost + kept` calls of backward per update had their gradients cleared before it."""

    backward: Place
    update: Place
    lost: int
    kept: int
    cycles: int


class GradientsClearedBeforeStep(LoopIncident, frozen=True, kw_only=True):
    backward: Place
    update: Place
    updates: int


class StepWithoutBackward(LoopIncident, frozen=True, kw_only=True):
    """`is_first`: no gradient was ever computed."""

    updates: int
    is_first: bool = False


class ClipBeforeUnscale(LoopIncident, frozen=True, kw_only=True):
    update: Place
    bound: float


class GradientsOfAnotherLoss(LoopIncident, frozen=True, kw_only=True):
    """The backward of a loss that `other` minimises leaves gradients, and the one of `own` adds to them."""

    cleared: Place | None  # where the gradients are cleared, too early
    other: Place
    own: Place
    update: Place
    updates: int


class LossNotDivided(LoopIncident, frozen=True, kw_only=True):
    """`size` calls of backward per update."""

    update: Place
    size: int
    cycles: int


class ScheduleBeforeUpdate(LoopIncident, frozen=True, kw_only=True):
    """The learning rate that the schedule begins with, and the rate of the first update."""

    update: Place
    first: float
    used: float


class SchedulePerBatch(LoopIncident, frozen=True, kw_only=True):
    """`is_of_number`: it is given a number that is no epoch."""

    schedule: str
    why: str
    is_of_number: bool = False


class RateDecayed(LoopIncident, frozen=True, kw_only=True):
    """The rate was `first` at most, and is `rate` since step `since`, for `updates` updates.

    `schedule` is the class of the schedule, empty where there is none; `is_per_update`: it moves with every update.
    `reason` is "loaded" for a rate that came with a state, "absolute" for a factor that is the rate itself, "falling"
    for a schedule that waits for a number to rise, which falls, and "rising" for the opposite. "warming" and
    "per epoch": the run of `updates` updates is over, and the rate was still on its way up to `first`.
    """

    update: Place
    built: Place | None
    schedule: str
    is_per_update: bool
    reason: str = ""
    first: float
    rate: float
    since: int
    updates: int


class UpdatesLost(LoopIncident, frozen=True, kw_only=True):
    """Updates that are too small for the dtype of the weights.

    `graded` sampled weights have a gradient; `moved` of these have changed in `updates` updates. `rate` is the learning
    rate, `clipped_to` the norm to which the line of the cause clips the gradients, if that made them so small. `change`
    is how far an update moves the weights, relative to their size; 0 where nearly all are bit for bit what they were.
    """

    update: Place
    updates: int
    graded: int = 0
    moved: int = 0
    change: float = 0.0
    dtype: str = ""
    rate: float = 0.0
    clipped_to: float | None


class UpdatesUndone(LoopIncident, frozen=True, kw_only=True):
    """`kept` is the share of an update that is left at the next one; `decay` is 0 where a line undoes the update.

    `set_back` says how often the weights of another module were loaded that never changed in between.
    """

    update: Place
    updates: int
    kept: float
    set_back: int = 0
    is_new: bool = False
    decay: float = 0.0
    rate: float = 0.0


class VanishingGradients(LoopIncident, frozen=True, kw_only=True):
    """The largest gradient of each layer, from the first layer to the layer with the largest gradient.

    The first `still` layers did not change in `updates` updates. `names` has a name for each layer, or is empty.
    """

    update: Place
    updates: int
    gradients: list[float]
    still: int
    names: list[str]


class OptimizerMadeAnew(LoopIncident, frozen=True, kw_only=True):
    """Each of `updates` updates of the same weights was the first one of an optimizer of its own."""

    kind: str
    update: Place
    updates: int


class OptimizerNeverSteps(LoopIncident, frozen=True, kw_only=True):
    """`backwards` calls of backward, `cleared` times their gradients were cleared, and no update.

    `is_named`: the cause is a line that names `step` without calling it. `is_skipped`: a condition that never holds.
    `steps_other`: a line that steps another optimizer.
    """

    backward: Place
    backwards: int
    cleared: int
    is_named: bool
    is_skipped: bool
    steps_other: bool


class ZeroLearningRate(LoopIncident, frozen=True, kw_only=True):
    """`scheduled` counts the moves of a schedule, `first` is the rate it began with. `is_alone`: no other one steps.

    `is_whole`: an integer division gives 0 where a ratio was meant, which may become 1 later.
    """

    first: float
    update: Place
    updates: int
    scheduled: int
    is_alone: bool
    is_whole: bool = False


class PicturesCutApart(LoopIncident, frozen=True, kw_only=True):
    """The table `name` has pictures with their channels last; those of a batch have this shape, in the same order.

    `call` is the method that gives the shape, empty where that is not known.
    """

    data: Place
    call: str
    name: str
    shape: tuple[int, int, int]
    compared: int


class TrainingInEvalMode(LoopIncident, frozen=True, kw_only=True):
    """`before` updates in training mode, `since` updates in evaluation mode; layers that act differently in it."""

    forward: Place
    before: int
    since: int
    norms: list[str]
    dropouts: list[str]


class ValidationInTrainMode(LoopIncident, frozen=True, kw_only=True):
    """`forward` is the call of a model that another one learns from; None where the model is validated."""

    data: Place
    norms: list[str]
    dropouts: list[str]
    forward: Place | None = None


class SameBatchEveryStep(LoopIncident, frozen=True, kw_only=True):
    """`batches` is how many the loader has."""

    times: int
    batches: int


class ClassesInOrder(LoopIncident, frozen=True, kw_only=True):
    """The `first` of `length` items of the dataset are of one class; `batch` is the size of a batch."""

    classes: int
    batch: int
    length: int
    first: int


class IdenticalInputs(LoopIncident, frozen=True, kw_only=True):
    """`name` is the attribute of the dataset that holds the same value for all items; empty where none is known.

    With `is_one_item` labels are equal as well: the attribute has an entry for each item, and one of them is given for
    all. With `is_overwritten` the inputs are equal in each batch only: the attribute is given for all items, and
    written to. `label` is what the labels of all items are, where these are the same and the inputs are not.
    """

    data: Place
    name: str
    rows: int
    batches: int
    is_one_item: bool = False
    is_overwritten: bool = False
    label: int | None = None


class LabelsOfOtherItems(LoopIncident, frozen=True, kw_only=True):
    """In `batches` steps, inputs and labels came from different items; `length` is how many batches a pass has.

    `names` are two variables that the script shuffled apart before training, the first of them at `other`. `pairs` is
    the size of a table of all pairs whose labels name one column for all rows, or, with `is_itself`, each row itself.
    """

    batches: int
    length: int
    other: Place | None = None
    names: tuple[str, str] | None = None
    pairs: int = 0
    is_itself: bool = False


class LoopWithoutBatches(LoopIncident, frozen=True, kw_only=True):
    """`name` is the iterator that one pass uses up, made before a loop of `turns`; else a loader gave no batch at all.

    `items` is the number of items of the dataset of that loader, `size` what a batch should have.
    """

    name: str
    loop: Place | None = None
    kind: str = ""
    turns: int = 0
    items: int = 0
    size: int = 0


class NothingLoaded(LoopIncident, frozen=True, kw_only=True):
    load: Unmatched


class OneLayerForSeveral(LoopIncident, frozen=True, kw_only=True):
    """`name` is the container that holds one layer of this `kind` several `times`, with so many `elements`."""

    name: str
    kind: str
    times: int
    elements: int


class RandomNumbersRepeat(LoopIncident, frozen=True, kw_only=True):
    """`cause` is the line that sets the generator back, if that is known, else `loading`, which begins the passes."""

    loading: Place
    passes: int


class StateNotCopied(LoopIncident, frozen=True, kw_only=True):
    """`loading` is the line that loads the state, `cause` the line that took it, if that is known.

    `is_one_module`: the state of another variable is loaded, and `cause` has made both variables the same module.
    """

    loading: Place
    tensors: int
    is_one_module: bool = False


class SameRandomnessInWorkers(LoopIncident, frozen=True, kw_only=True):
    """`name` is the attribute of the dataset that holds the generator, `kind` the class of the generator."""

    data: Place
    dataset: type
    name: str
    kind: str
    workers: int


class EmptyCacheEveryStep(LoopIncident, frozen=True, kw_only=True):
    """`share` of the time of a step, `each` in seconds."""

    share: float
    each: float
    calls: int


class NeedlessWait(LoopIncident, frozen=True, kw_only=True):
    waited: Waited


class GrowingGraph(LoopIncident, frozen=True, kw_only=True):
    """`sizes` are step, operations of earlier steps, all operations. `held` is the variable that carries the graph."""

    sizes: list[tuple[int, int, int]]
    held: Held | None


class LeftoverMicroBatches(LoopIncident, frozen=True, kw_only=True):
    """`length` batches of an epoch, `size` of an accumulation cycle, `left` at the end, which may be lost."""

    left: int
    size: int
    length: int
    is_lost: bool


class DropoutInEvaluation(LoopIncident, frozen=True, kw_only=True):
    """The function that drops values, and the share of the values that it drops."""

    name: str
    share: float


class UnregisteredLayers(LoopIncident, frozen=True, kw_only=True):
    """`path` leads to the module whose attribute `name`, a container of class `kind`, holds the layers."""

    module: type
    path: str
    name: str
    kind: str
    layers: int
    holds_modules: bool
    tensors: int
    elements: int


class ReplacedParameters(LoopIncident, frozen=True, kw_only=True):
    """`names` are the new parameters, `old` the shapes of the tensors that the optimizer still holds."""

    names: list[str]
    elements: int
    old: list[tuple[int, ...]]


class OptimizerOfTwin(ReplacedParameters, frozen=True, kw_only=True):
    """The optimizer holds a model of the same shapes, which no loss reaches; it may be a moving average."""


class OptimizerOfOriginal(LoopIncident, frozen=True, kw_only=True):
    """The losses are computed with copies of a model, which are dropped; the optimizer holds `held` tensors of it."""

    update: Place
    updates: int
    held: int


class ParametersWithoutOptimizer(LoopIncident, frozen=True, kw_only=True):
    """`names` are the layers that no optimizer has, with `elements` weights; `updates` were seen since.

    `sign` is a call that treats them as trained, such as `decoder.train()`, on the line `signed`. It is empty if they
    stand between trained layers and the loss. `twin` is where an optimizer with the same parameters was built. If
    `are_bare`, the names are parameters that belong to no layer of torch's.
    """

    names: list[str]
    elements: int
    updates: int
    update: Place
    sign: str = ""
    signed: Place | None = None
    twin: Place | None = None
    are_bare: bool = False
    has_biases: bool = False  # the optimizer has the biases of the same layers
    is_thawed: bool = False  # they were frozen when the optimizer was built


class LeafMadeAnew(LoopIncident, frozen=True, kw_only=True):
    """The leaves of every loss are new tensors. `cause` is the line that makes them, or else builds the optimizer."""

    update: Place
    updates: int
    held: int
    built: Place | None


class LayerMadeAnew(LoopIncident, frozen=True, kw_only=True):
    """Parameters behind trained layers are made anew in each step: `what` the line makes, such as `nn.Linear`."""

    what: str
    update: Place
    updates: int


class UselessOptimizer(LoopIncident, frozen=True, kw_only=True):
    """No update had a gradient: the optimizer `held` parameters that no loss reaches, and others are `reached`."""

    update: Place
    updates: int
    held: int
    reached: int
    elements: int


class FrozenOptimizer(UselessOptimizer, frozen=True, kw_only=True):
    """`requires_grad` is off for all parameters that the optimizer holds.

    `built` is the construction of the optimizer, where the cause is the line that freezes.
    """

    built: Place | None = None


class FrozenLayers(LoopIncident, frozen=True, kw_only=True):
    """`names` are frozen matrices that can never do anything: `zero` ones, or all of a model that was never trained."""

    names: list[str]
    updates: int
    is_zero: bool
    built: Place | None


class OptimizerOfOtherModel(UselessOptimizer, frozen=True, kw_only=True):
    """The optimizer holds parameters of a model that is not trained, and that the loop calls elsewhere.

    `forward` is the call of the model that the loss reaches; None where the model of the optimizer is never called.
    """

    forward: Place | None = None


class GradientsKeptBack(UselessOptimizer, frozen=True, kw_only=True):
    """The parameters that the optimizer holds are parts of those that the losses reach, and get no gradient of them."""


class FreezeWithoutEffect(LoopIncident, frozen=True, kw_only=True):
    """`what` is an attribute that was set on `owner`, a parameter or a module, and that torch does not read."""

    what: str
    owner: str
    is_module: bool
    still_trained: int


class ResultThrownAway(LoopIncident, frozen=True, kw_only=True):
    """`what` is the operation, or for `is_rebound` the variable of a loop over parameters that gets another value."""

    what: str
    is_rebound: bool


class ClipWithoutEffect(LoopIncident, frozen=True, kw_only=True):
    """Gradients are clipped before they are computed, or for `is_late` after the update that used them."""

    update: Place
    bound: float
    updates: int
    is_late: bool
