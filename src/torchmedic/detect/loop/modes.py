"""Training and evaluation mode, as the loop switches between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from torchmedic.detect.loop.incident import DropoutInEvaluation, LoopIncident, TrainingInEvalMode, ValidationInTrainMode
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.syntax import callee, calls_in, has_line, nodes_in, syntax_tree

_MIN_STEPS = 4  # in evaluation mode that show a habit
_MIN_STEPS_OF_NEVER = 24  # in evaluation mode, without one in training mode before
_MIN_BATCHES = 4  # batches of a validation
_MIN_LESSONS = 8  # updates that followed a call of a model which is not trained
_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
_MOVES = frozenset({"to", "cuda", "cpu", "float"})  # calls around a batch that is given to a model


def find(habits: Habits) -> Iterator[LoopIncident]:
    yield from _trained_in_eval(habits)
    yield from _validated_in_train(habits)
    yield from _teaching_in_train(habits)
    for dropped in habits.evaluation.dropped.values():
        yield DropoutInEvaluation(step=habits.steps, cause=dropped.place, name=dropped.name, share=dropped.share)


def layers_that_care(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the layers that act in another way in evaluation mode: normalising with statistics, and dropout."""
    norms = [name for name, part in model.named_modules() if isinstance(part, _NORMS) and part.track_running_stats]
    return norms, [name for name, part in model.named_modules() if _drops(part)]


def _drops(part: nn.Module) -> bool:
    """Whether a layer drops values in training mode, by itself or inside of what it computes."""
    if isinstance(part, nn.RNNBase):
        return part.dropout > 0 and part.num_layers > 1
    if isinstance(part, nn.MultiheadAttention):
        return bool(part.dropout)
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0


def _updates(events: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Calls of backward that an update has followed, with the forward pass of the root module before them."""
    forward: Event | None = None
    waiting: list[tuple[Event, Event]] = []
    for event in events:
        if event.kind == "gap":
            forward, waiting = None, []
        elif event.kind == "forward" and event.fact.with_gradients:
            forward = event
        elif event.kind == "backward" and forward is not None:
            waiting.append((forward, event))
        elif event.kind == "step done":
            yield from waiting
            waiting = []


def _trained_in_eval(habits: Habits) -> Iterator[LoopIncident]:
    """The model is trained in evaluation mode: since it was switched there once, or from the start."""
    by_site: dict[tuple[int, int], list[tuple[Event, Event]]] = {}
    for forward, backward in _updates(habits.events):
        by_site.setdefault((forward.who, backward.site), []).append((forward, backward))
    for (who, _), calls in by_site.items():
        switch = _last_in_training(calls)
        model = habits.thing(who)
        if isinstance(model, nn.Module) and not any(forward.fact.training for forward, _ in calls):
            yield from _never_in_training(habits, model, who, calls)
        if switch is None or not isinstance(model, nn.Module) or model.training:
            continue
        norms, dropouts = layers_that_care(model)
        # A part that is in training mode all the same was put there by somebody who knows.
        aware = any(part.training for part in model.modules() if isinstance(part, _NORMS + _DROPOUTS))
        if aware or not (norms or dropouts):
            continue
        last_forward, last_backward = calls[-1]
        since = [event for event in habits.events[habits.events.index(calls[switch][1]) :] if event.who == who]
        calls_of_eval = [event for event in since if event.kind == "eval"]
        validated = any(
            event.kind == "forward" and not event.fact.with_gradients and not event.fact.training for event in since
        )
        if len(calls_of_eval) < (1 if switch else 2) or not validated:
            continue  # nothing was evaluated: it may be frozen on purpose from here on
        before = habits.events[habits.events.index(calls[0][1]) : habits.events.index(calls[switch][0])]
        if any(event.kind == "eval" and event.who == who for event in before):
            continue  # the script switches back after an evaluation: now it does not, on purpose
        yield TrainingInEvalMode(
            step=last_backward.step,
            cause=calls_of_eval[0].place,
            forward=last_forward.place,
            before=calls[switch][1].step + 1,
            since=len(calls) - switch - 1,
            norms=norms,
            dropouts=dropouts,
        )


def _never_in_training(
    habits: Habits, model: nn.Module, who: int, calls: list[tuple[Event, Event]]
) -> Iterator[LoopIncident]:
    """The model was in evaluation mode from the first update on, and its normalisation has never seen any data.

    To normalise with statistics that were learned before is often meant. Those of the constructor do not normalise.
    """
    switched = [event for event in habits.events if event.kind == "eval" and event.who == who]
    norms = [
        part
        for part in model.modules()
        if isinstance(part, _NORMS) and part.track_running_stats and not _is_frozen(part)
    ]
    if len(calls) < _MIN_STEPS_OF_NEVER or not switched or not norms or any(part.training for part in norms):
        return
    if any(part.num_batches_tracked is None or int(part.num_batches_tracked) for part in norms):
        return
    if any(bool(part.running_mean.any()) for part in norms if part.running_mean is not None):
        return  # they were loaded or copied
    last_forward, last_backward = calls[-1]
    names, dropouts = layers_that_care(model)
    yield TrainingInEvalMode(
        step=last_backward.step,
        cause=switched[-1].place,
        forward=last_forward.place,
        before=0,
        since=len(calls),
        norms=names,
        dropouts=dropouts,
    )


def _is_frozen(part: nn.Module) -> bool:
    """Whether a layer has parameters, and the script has frozen all of them."""
    parameters = list(part.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _last_in_training(calls: list[tuple[Event, Event]]) -> int | None:
    """The last call in training mode, if all calls before it were in training mode and all after it were not."""
    modes: list[bool] = [forward.fact.training for forward, _ in calls]
    switch = sum(modes) - 1
    if switch < 0 or len(modes) - switch - 1 < _MIN_STEPS or not all(modes[: switch + 1]):
        return None
    return switch


def _validated_in_train(habits: Habits) -> Iterator[LoopIncident]:
    """Batches of another dataset went through the trained model in training mode, without gradients, one by one."""
    trained = {forward.who for forward, _ in _updates(habits.events)}
    learned_from = _datasets_of_training(habits.events)
    if not trained or not learned_from:
        return
    run: list[tuple[Event, Event]] = []
    fetch: Event | None = None
    for position, event in enumerate(habits.events):
        if event.kind in ("gap", "backward", "step", "eval"):
            run, fetch = [], None
        elif event.kind == "fetch":
            fetch = event
        elif event.kind == "forward":
            is_validation = (
                fetch is not None
                and fetch.fact.direct
                and fetch.fact.dataset
                and fetch.fact.dataset not in learned_from
                and event.who in trained
                and event.fact.training
                and not event.fact.with_gradients
            )
            if not is_validation or fetch is None or (run and run[-1][1].who != event.who):
                run = []
                continue
            if not run or run[-1][0] is not fetch:
                run.append((fetch, event))
            if len(run) == _MIN_BATCHES:
                yield from _of_validation(habits, run, position)


def _of_validation(habits: Habits, run: list[tuple[Event, Event]], position: int) -> Iterator[LoopIncident]:
    """A validation, unless dropout is active to draw several results of each batch, or nobody reads the results."""
    fetch, forward = run[-1]
    model = habits.thing(forward.who)
    if not isinstance(model, nn.Module) or not any(event.kind == "step" for event in habits.events[position:]):
        return  # training does not go on: it may be a look at the end, with dropout on purpose
    norms, dropouts = layers_that_care(model)
    active = [part for part in model.modules() if part.training and (isinstance(part, _NORMS) or _drops(part))]
    if not active or not (norms or dropouts) or _is_result_dropped(forward.place):
        return
    if any(isinstance(part, _NORMS) for part in active) or not _are_draws(forward.place, fetch.place):
        cause: Place = forward.place
        yield ValidationInTrainMode(step=forward.step, cause=cause, data=fetch.place, norms=norms, dropouts=dropouts)


def _teaching_in_train(habits: Habits) -> Iterator[LoopIncident]:
    """A model that was trained before, or loaded, gives its results in training mode while another one is trained.

    A target network that follows the trained one changes. A model whose weights are random was never trained.
    """
    for number, teacher in habits.teachers.found.items():
        model = habits.thing(number)
        if teacher.calls < _MIN_LESSONS:
            continue
        trained = {forward.who for forward, _ in _updates(habits.events) if forward.step < teacher.weight.step}
        owned = (tensor for watched in habits.optimizers.values() for tensor in watched.parameters)
        if number not in trained and not habits.teachers.is_loaded(number, owned):
            continue
        if not isinstance(model, nn.Module) or not model.training or teacher.weight.is_written():
            continue
        norms, dropouts = layers_that_care(model)
        if not (norms or dropouts) or _is_result_dropped(teacher.place) or (not norms and _is_drawn(teacher.place)):
            continue
        yield ValidationInTrainMode(
            step=teacher.last,
            cause=_switched_on(teacher.place) or teacher.place,
            data=NOWHERE,
            norms=norms,
            dropouts=dropouts,
            forward=teacher.place,
        )


def _is_drawn(place: Place) -> bool:
    return _are_draws(place, NOWHERE)


def _switched_on(place: Place) -> Place | None:
    """The only line that puts the model which is called on a line into training mode."""
    tree = syntax_tree(place.file)
    called = {ast.unparse(call.func) for call in calls_in(tree) if has_line(call, place.line)}
    switches = [
        call.lineno
        for call in calls_in(tree, "train")
        if isinstance(call.func, ast.Attribute) and not call.args and ast.unparse(call.func.value) in called
    ]
    return Place(place.file, switches[0]) if len(switches) == 1 else None


def _is_result_dropped(place: Place) -> bool:
    """Whether a line only calls the model, as to make the statistics of its normalisation anew."""
    statements = [node for node in nodes_in(syntax_tree(place.file)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if has_line(node, place.line)]
    last = max(around, key=lambda node: (node.lineno, node.col_offset), default=None)
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return False
    inner = [node for node in ast.walk(last.value) if isinstance(node, ast.Call) and node is not last.value]
    return all(callee(call) in _MOVES for call in inner)


def _are_draws(place: Place, data: Place) -> bool:
    """Whether a loop inside of that over the batches does the same thing several times, so that only chance differs."""
    for node in nodes_in(syntax_tree(place.file)):
        if not isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp):
            continue
        iters = [node.iter] if isinstance(node, ast.For) else [part.iter for part in node.generators]
        if not any(map(_is_range, iters)) or not has_line(node, place.line):
            continue
        if place.file == data.file and isinstance(node, ast.For) and has_line(node, data.line):
            continue  # over the epochs, or over the batches
        names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
        stored = {part.id for part in names if isinstance(part.ctx, ast.Store)}
        if stored.isdisjoint(part.id for part in names if isinstance(part.ctx, ast.Load)):
            return True
    return False


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and callee(node) == "range"


def _datasets_of_training(events: list[Event]) -> set[int]:
    """The datasets whose batches were followed by a call of backward."""
    found: set[int] = set()
    fetch: Event | None = None
    for event in events:
        if event.kind == "fetch":
            fetch = event
        elif event.kind == "backward" and fetch is not None:
            found.add(fetch.fact.dataset)
    return found
