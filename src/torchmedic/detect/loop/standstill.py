"""Updates that change nothing: the rate has fallen to nothing, the weights cannot hold them, or gradients vanish.

Beyond doubt are only: a rate that has been next to nothing for more than half of all updates; samples of weights that
are bit for bit what they were many updates ago although they have gradients and a rate that does not rise; gradients
that fall from layer to layer until they are too small to change the first layers.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from torchmedic.detect.loop.incident import LoopIncident, RateDecayed, UpdatesLost, VanishingGradients
from torchmedic.detect.loop.plateaus import mistaken_for_plateau
from torchmedic.detect.loop.schedules import rates_by_hand
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.optimizer_looks import DOUBTFUL_CHANGE, MAX_DEAD_SHARE, MAX_PLAIN_RATE, LayerMoves, Steady
from torchmedic.source.live_frames import stack_of
from torchmedic.source.lookup.layer_construction import given_modules
from torchmedic.source.lookup.layers import layer_built_at, roots
from torchmedic.source.lookup.optimizers import advanced_at, rate_set_at, schedulers_of
from torchmedic.source.spots import NOWHERE, Place

_MIN_DEAD_UPDATES = 48
_MIN_NEGATIVE_UPDATES = 8  # a schedule that ends one update early does no harm
_MIN_MOVES = 4  # of a schedule, after which a warm-up has left its first rate
_MAX_PATIENCE = 10  # updates that are too few to tell a plateau from the noise of batches; the default of torch
_MAX_MOVED_SHARE = 0.1  # of the weights with a gradient
_MAX_MOVED_SHARE_OF_HALVES = 0.25  # of weights of 16 bits, of which the smallest always move
_HALF = 2  # bytes
_MAX_FALL = 0.1  # of the largest gradient, since the weights were copied
_MAX_SQUARED = 1e18  # the square of a larger gradient is not far from the largest float32
_MIN_GRADED = 64  # sampled weights with a gradient
_MIN_STILL_LAYERS = 2
_MAX_SHARE_BY_MISTAKE = 0.01  # of the largest rate, where a schedule waits for a number to rise, which falls
_MAX_TIGHT_BOUND = 0.01  # of a clip that makes updates small; usual bounds are 0.1 to 10
_MAX_CLIPPED_SHARE = 1e-5  # of the size of weights, per update; a careful fine-tuning moves them fifty times as far
_MIN_GRADIENT_SHARE = 1e-3  # of the size of weights: with such gradients, it is the rate that makes updates small
_MAX_TINY_RATE = 1e-6  # a larger one may be meant, as for a careful fine-tuning
_MIN_BRAKE = 1e-3  # 1 minus a momentum
_CLIP_TOLERANCE = 0.05  # between the norm of clipped gradients and the bound; torch adds 1e-6 to the norm
_MIN_SLOPE = 4  # layers from one to the next of which the gradient grows
_MIN_SLOPE_SHARE = 0.6  # of all layers up to the layer with the largest gradient
_MIN_GROWTH = 2.0  # of the gradient from one layer to the next
_MIN_RATIO = 1e6  # of the largest gradient of a layer that moves to that of a layer that does not


def find(habits: Habits) -> Iterator[LoopIncident]:
    for number, watched in list(habits.optimizers.items()):
        known = habits.standstill.of(watched.optimizer) if watched.optimizer is not None else None
        if known is None:
            continue
        steps = [event for event in habits.events if event.kind == "step" and event.who == number]
        update = steps[-1].place if steps else NOWHERE
        if not known.has_judged_rates:
            decayed = list(_decayed(habits, watched, known, update))
            known.has_judged_rates = bool(decayed)
            yield from decayed
        if not known.has_judged_moves:
            still = list(_lost(habits, watched, known, update)) or list(_vanishing(watched, known, update))
            known.has_judged_moves = bool(still)
            yield from still


def _decayed(habits: Habits, watched: Watched, known: Steady, update: Place) -> Iterator[LoopIncident]:
    """The rate has been negative, or next to nothing for most of the run, or small by mistake from the first update."""
    negative = known.negative_since()
    plateaus = [each for each in schedulers_of(watched.optimizer) if isinstance(each, ReduceLROnPlateau)]
    reason = _small_from_the_first(watched, known)
    if not reason:
        reasons = (mistaken_for_plateau(each, habits.metrics.get(habits.number(each), ())) for each in plateaus)
        reason = next(filter(None, reasons), "")
    if reason in ("falling", "rising"):
        dead = known.nothing_since(_MAX_SHARE_BY_MISTAKE)
    else:
        dead = negative or known.nothing_since() or (known.rates[0] if reason else None)
    last = known.rates[-1].step if known.rates else 0
    enough = _MIN_DEAD_UPDATES if reason else max(_MIN_DEAD_UPDATES, dead.step if dead is not None else 0)
    if dead is None or last - dead.step < (_MIN_NEGATIVE_UPDATES if negative else enough):
        return
    number = watched.number
    moves = [event for event in habits.events if event.kind == "schedule" and event.fact.optimizer == number]
    updates = [event for event in habits.events if event.kind == "step" and event.who == number]
    is_per_update = bool(moves) and len({move.site for move in moves}) == 1 and len(moves) >= len(updates) - 1
    schedules = schedulers_of(watched.optimizer)
    patience = [] if reason else [each.patience for each in plateaus]
    if patience and not (is_per_update and max(patience) <= _MAX_PATIENCE):
        return  # the loss has not fallen for long: a plateau
    frames = stack_of(sys._getframe())
    value = max(each.rate for each in known.rates) if reason == "absolute" else None
    found = rate_set_at(frames, watched.optimizer, "origin", "", value=value)
    built = Place(found.file, found.line) if found is not None else watched.built
    step = None
    if is_per_update and moves[-1].place.line:
        step = advanced_at(frames, habits.thing(moves[-1].who), moves[-1].place)
    yield RateDecayed(
        step=last,
        cause=(watched.loaded if reason == "loaded" else step if not reason else None) or built or update,
        optimizer=number,
        update=update,
        built=built if not reason else None,
        schedule=type(schedules[0]).__name__ if schedules else "",
        is_per_update=is_per_update,
        reason=reason,
        first=_meant(watched) if reason else max(each.rate for each in known.rates),
        rate=known.rates[-1].rate,
        since=dead.step,
        updates=last - dead.step,
    )


def _meant(watched: Watched) -> float:
    """The rate with which an optimizer was built."""
    rate = watched.optimizer.defaults.get("lr", 0.0)
    return float(rate) if isinstance(rate, float | int) else 0.0


def _small_from_the_first(watched: Watched, known: Steady) -> str:
    """Why the rate was never what the optimizer was built with: it came with a state, or is multiplied with itself."""
    meant, largest = _meant(watched), max((each.rate for each in known.rates), default=0.0)
    is_tiny = watched.loaded is not None and 0 < largest <= MAX_DEAD_SHARE * meant
    is_square = 0 < meant <= MAX_PLAIN_RATE and math.isclose(largest, meant * meant, rel_tol=1e-6)
    if not (is_tiny or is_square):
        return ""
    schedules = schedulers_of(watched.optimizer)
    if is_tiny and not schedules:
        return "loaded"
    factors = [each for each in schedules if type(each) is LambdaLR and each.last_epoch >= _MIN_MOVES]
    return "absolute" if is_square and len(factors) == len(schedules) == 1 else ""


def _lost(habits: Habits, watched: Watched, known: Steady, update: Place) -> Iterator[LoopIncident]:
    """Nearly all weights are what they were, although they have gradients: the updates are rounded away."""
    moves = known.moves
    layers = moves.layers if moves is not None else []
    layers = [layer for layer in layers if layer.is_matrix] or layers  # a bias begins at 0, where all updates count
    graded = sum(layer.graded for layer in layers)
    if moves is None or graded < _MIN_GRADED or _small_from_the_first(watched, known):
        return
    moved = sum(layer.moved for layer in layers)
    largest = max(layers, key=lambda layer: layer.graded)
    most = (_MAX_MOVED_SHARE_OF_HALVES if largest.dtype.itemsize == _HALF else _MAX_MOVED_SHARE) * graded
    now, before = (
        max(layer.largest_gradient for layer in moves.layers),
        max(layer.largest_before for layer in moves.layers),
    )
    clip = _tight_clip(habits, watched)
    change = moves.change
    is_held = clip is not None and change < DOUBTFUL_CHANGE
    if clip is not None and not is_held:  # a decay of the weights may move them more than the gradients do
        change = _clipped_share(watched.optimizer, clip.fact)
        is_held = change < _MAX_CLIPPED_SHARE
    if clip is None and not schedulers_of(watched.optimizer) and not rates_by_hand():
        is_tiny = _MIN_GRADIENT_SHARE * largest.rate < change < DOUBTFUL_CHANGE
        is_held = is_tiny and largest.rate <= _MAX_TINY_RATE
    if (moved > most and not is_held) or now < _MAX_FALL * before:
        return  # gradients that have collapsed belong to a training that has come to its end
    if now > _MAX_SQUARED:
        return  # the optimizer divides by an infinite square: the gradients explode
    yield UpdatesLost(
        step=moves.until,
        cause=clip.place if clip is not None else watched.built or update,
        clipped_to=clip.fact if clip is not None else None,
        optimizer=watched.number,
        update=update,
        updates=moves.until - moves.since,
        graded=graded,
        moved=moved,
        change=change if moved > most else 0.0,
        dtype=str(largest.dtype).removeprefix("torch."),
        rate=largest.rate,
    )


def _tight_clip(habits: Habits, watched: Watched) -> Event | None:
    """The last call that clips gradients, if the norm of the gradients is its bound: the clip made them that small."""
    clips = [event for event in habits.events if event.kind == "clip" and event.fact and event.place.line]
    clips = [event for event in clips if event.fact <= _MAX_TIGHT_BOUND]
    groups = watched.optimizer.param_groups if watched.optimizer is not None else []
    gradients = [tensor.grad for group in groups for tensor in group["params"] if tensor.grad is not None]
    if not clips or not gradients:
        return None
    norm = float(torch.nn.utils.get_total_norm(gradients))
    return clips[-1] if math.isclose(norm, clips[-1].fact, rel_tol=_CLIP_TOLERANCE) else None


def _clipped_share(optimizer: torch.optim.Optimizer, bound: float) -> float:
    """How far an update with gradients of a norm can move weights, relative to their size, where that is known."""
    if type(optimizer) is not torch.optim.SGD:
        return math.inf
    groups = optimizer.param_groups
    pace = max(float(group["lr"]) / max(1 - float(group["momentum"]), _MIN_BRAKE) for group in groups)
    weights = [tensor.detach() for group in groups for tensor in group["params"] if tensor.grad is not None]
    size = float(torch.nn.utils.get_total_norm(weights))
    return pace * bound / size if size else math.inf


def _vanishing(watched: Watched, known: Steady, update: Place) -> Iterator[LoopIncident]:
    """Gradients that fall from layer to layer, until the first layers no longer change."""
    layers = [layer for layer in known.moves.layers if layer.is_matrix] if known.moves is not None else []
    if known.moves is None or len(layers) <= _MIN_SLOPE:
        return
    top = max(range(len(layers)), key=lambda place: layers[place].largest_gradient)
    below = layers[: top + 1]
    still = list(itertools.takewhile(lambda layer: layer.moved == 0, below))
    pairs = list(itertools.pairwise(layer.largest_gradient for layer in below))
    growing = sum(after >= _MIN_GROWTH * before and after > 0 for before, after in pairs)
    if len(still) < _MIN_STILL_LAYERS or growing < _MIN_SLOPE or growing < _MIN_SLOPE_SHARE * len(pairs):
        return
    largest = below[-1].largest_gradient
    if any(layer.largest_gradient * _MIN_RATIO > largest for layer in still) or 2 * below[-1].moved < below[-1].graded:
        return
    names, built = _named(below)
    yield VanishingGradients(
        step=known.moves.until,
        cause=built or watched.built or update,
        optimizer=watched.number,
        update=update,
        updates=known.moves.until - known.moves.since,
        gradients=[layer.largest_gradient for layer in below],
        still=len(still),
        names=names,
    )


def _named(layers: list[LayerMoves]) -> tuple[list[str], Place | None]:
    """The names of layers in the model that holds them all, and the line that builds the first of them."""
    frames = stack_of(sys._getframe())
    tensors = [layer.reference() for layer in layers]
    for model in [*roots(frames), *given_modules(frames)]:
        known = {id(tensor): name for name, tensor in model.named_parameters()}
        if all(tensor is not None and id(tensor) in known for tensor in tensors):
            first = _owner(model, tensors[0])
            built = layer_built_at(frames, first, "") if first is not None else None
            names = [known[id(tensor)].removesuffix(".weight") for tensor in tensors]
            return names, Place(built.file, built.line) if built is not None else None
    return [], None


def _owner(model: nn.Module, tensor: torch.Tensor | None) -> nn.Module | None:
    return next(
        (module for module in model.modules() if any(own is tensor for own in module._parameters.values())), None
    )
