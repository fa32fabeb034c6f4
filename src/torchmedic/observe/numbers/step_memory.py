"""What it takes to run the last updates again: the backward calls before them, and copies of the weights.

The first calls are kept with a copy from before the first update. Later calls and copies are kept as long as that takes
a small share of the run's time: then some dozen steps in a row, and not again until there is time for as many. When the
loss rises, the steps are kept in any case.
"""

from __future__ import annotations

import resource
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import thread_time
from types import FrameType
from typing import Any

import torch

from torchmedic.observe.budget import Account
from torchmedic.observe.numbers.kept_steps import KeptBackward, KeptBackwards
from torchmedic.observe.numbers.kept_values import Kept
from torchmedic.observe.numbers.loss_trend import RISE, LossJumps, LossTrend
from torchmedic.observe.numbers.weight_copies import Rewind, is_plain
from torchmedic.observe.numbers.windows import Copy, NoRoom, Window, beside, note_end, take_copy, update_end, windows_of
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.graph import leaves_behind

_UPDATES_BETWEEN_COPIES = 6
_LATE_COPIES = 2  # beside the first: the older one is always some updates old
_CALLS_IN_A_ROW = 32  # that there must be time for, to begin again
_FIRST_CALLS = 12  # that are kept whatever time that takes
_FIRST_UPDATES = 12  # whose calls are kept with the first copy
_MAX_FIRST_CALLS = 34  # of these updates, which an accumulation makes of several calls each
_MAX_FIRST_BATCH_BYTES = 4 << 20  # of each of them
_FIRST_KEPT_UPDATES = 400  # after that many, how training began explains nothing
_MAX_RISES = 8  # that are kept whatever time that takes
_UPDATES_OF_RISE = 24  # that are kept when the loss rises
_MAX_NODES = 2000  # of a graph that is walked to its leaves
_MAX_LEAF_BYTES = 1 << 20  # of the tensors that one call of a loop without an optimizer trains
_MAX_TRENDS = 16
_UPDATES_OF_LOST_TRAINING = 6  # in a row
_UPDATES_OF_LOST_BELOW_ZERO = 12  # in a row: a loss that falls does so slowly, and no overflow is near
_UPDATES_OF_FAR_LOSS = 48  # after which training is not expected to recover
_UPDATES_PER_STUCK = 2  # a loss that the first updates have raised comes back more slowly


class StepMemory:
    """Keeps the updates and takes the copies; `FiniteWatch` calls it."""

    def __init__(self, kept_backwards: KeptBackwards, rewind: Rewind, account: Account) -> None:
        self._account = account
        self._kept = kept_backwards
        self._rewind = rewind
        self._first: list[KeptBackward] = []
        self._start: Copy | None = None
        self._copies: deque[Copy] = deque(maxlen=_LATE_COPIES)
        self._risen: Copy | None = None  # taken when the loss began to rise
        self._owes_copy = False  # the loss began to rise in a step that was not kept
        self._last_copy = 0  # number of the update before which it was taken
        self._last_rise = -inf
        self._rises = 0
        self._by_hand = 0  # updates that were seen without an optimizer
        self._leaves: list[weakref.ref[torch.Tensor]] = []  # that these update
        self._trends: dict[Any, LossTrend] = {}  # by the line that calls backward
        self._copy_seconds = 0.0  # that one takes
        self._call_seconds = 0.0
        self.is_open = True  # calls are kept at present
        self._in_any_case = _FIRST_CALLS  # calls that are kept whatever time that takes
        self.is_late = False  # the weights are on a device that is read late
        self.ceiling = inf  # a loss above it is worth a closer look
        self.lost_updates = 0  # in a row, until now, whose loss was far beyond the first ones
        self.is_lost = False  # the loss is so large, and has been for so long, that it cannot be meant
        self.has_left = False  # the loss has left its earlier level, and may come back
        self.is_far = False  # the loss left its earlier level long ago, and did not come back
        self._pinned: list[Window] = []  # what can be run again of the updates in which the loss left its level
        self._jumps = LossJumps()
        self.refused = ""  # why there are no copies

    def windows(self) -> list[Window]:
        """What can be run again: from the beginning of training, then from the older copies on."""
        return beside(self._pinned, self._present_windows())

    def _departure(self) -> list[Window]:
        return [window._replace(reaches_present=False, is_departure=True) for window in self._present_windows()]

    def _present_windows(self) -> list[Window]:
        return list(windows_of((self._start, *self._copies, self._risen), self._kept.calls, self._first))

    @property
    def is_away(self) -> bool:
        """Whether a loss is far from its earlier level now: what the layers do follows from that."""
        return any(trend.far or trend.lost for trend in self._trends.values())

    @property
    def is_still(self) -> bool:
        """Whether the loss, the only one, is where it was at first."""
        return [trend.is_still for trend in self._trends.values()] == [True]

    @property
    def first_call(self) -> KeptBackward | None:
        """The first backward call, while it is kept."""
        return self._first[0] if self._first else None

    def oldest_copy(self) -> Copy | None:
        """The weights of the longest time ago, whether or not the updates since then can be run again."""
        return next((copy for copy in (self._start, *self._copies, self._risen) if copy is not None), None)

    def record(self, frame: FrameType, update: int) -> KeptBackward | None:
        """Keep a backward call whose loss was read at once; None where there is no time for that.

        Where `is_open` is False, it is enough to ask now and then.
        """
        account = self._account
        needed = min(_CALLS_IN_A_ROW * self._call_seconds + _LATE_COPIES * self._copy_seconds, account.full)
        if not self.is_open and account.left < needed:
            return None
        self.is_open = True
        if not self._kept.calls and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            # What is kept lies between the tensors of the steps, so that the heap takes more addresses.
            self._refuse("the address space of the process is limited")
        if self.refused:
            self.is_open = False
            account.spend(inf)
            return None
        started = thread_time()
        call = self._kept.record(frame, update)
        self._call_seconds = thread_time() - started
        account.spend(self._call_seconds)
        if self._in_any_case:
            self._in_any_case -= 1
        elif account.left < 0:
            self.is_open = False
        return call

    # A backward call, and the update that follows

    def backward_begins(self, call: KeptBackward, stepping: Any) -> None:
        """A backward call was kept."""
        if stepping is not None:  # called by a closure, when the update is counted already
            call.update -= 1
            previous = self._kept.calls[-2] if len(self._kept.calls) > 1 else None
            call.is_repeated = previous is not None and previous.update == call.update
            call.ends = (update_end(stepping),)
        is_first = len(self._first) < _MAX_FIRST_CALLS and call.update <= _FIRST_UPDATES
        if is_first and not call.is_repeated and call.batch_bytes <= _MAX_FIRST_BATCH_BYTES:
            self._first.append(call)

    def note_leaves(
        self, call: KeptBackward, roots: Sequence[torch.Tensor], known: list[torch.Tensor] | None = None
    ) -> None:
        """Note what a loop without an optimizer trains: what is known, or else the leaves behind its loss."""
        started = thread_time()
        leaves = leaves_behind(roots, _MAX_NODES) if known is None else known
        self._account.spend(thread_time() - started)
        if not self._leaves:
            self._leaves = [weakref.ref(leaf) for leaf in leaves]
        if sum(leaf.nbytes for leaf in leaves) <= _MAX_LEAF_BYTES:
            call.leaves = [Kept(weakref.ref(leaf), leaf.detach(), leaf._version) for leaf in leaves]

    def backward_by_hand_begins(self, call: KeptBackward, place: Any) -> None:
        """A backward call was kept of a loop that has no optimizer: an update by hand is expected to follow."""
        call.by_hand = True
        call.update = self._by_hand
        self._by_hand += 1
        self.backward_begins(call, None)
        self._consider(list, call.update, self._note(place, call.loss))

    def update_begins(
        self,
        optimizer: Any,
        optimizers: Callable[[], list[Any]],
        frame: FrameType,
        update: int,
        place: Any,
        loss: float | None,
    ) -> None:
        """The weights of an optimizer are about to be changed.

        Args:
            optimizer: Which one.
            optimizers: Gives all that there are.
            frame: Somewhere below the user's call.
            update: How many updates came before.
            place: The line that called backward.
            loss: The last one, where it is known.
        """
        rises = self._note(place, loss)
        if self._jumps.updates_left and self._jumps.has_killed(optimizer, loss, is_readable=not self.is_late):
            self.has_left = self.is_far = True
            self._pinned = self._jumps.windows
        if not self.is_open:
            return
        call = self._kept.calls[-1] if self._kept.calls else None
        if call is not None and not call.is_sampled_out and call.update <= update:
            note_end(call, optimizer, frame)
        # The call of the first update of a rise was perhaps not kept: a copy is of use before the next update.
        is_kept = call is not None and not call.is_sampled_out and call.update == update
        is_due = rises or self._owes_copy
        self._owes_copy = is_due and not is_kept
        self._consider(optimizers, update, is_due and is_kept)

    def _note(self, place: Any, loss: float | None) -> bool:
        """Note the size of a loss; whether the steps from now on are worth keeping: it rises, or is far too large."""
        if loss is None:
            return False
        trend = self._trends.get(place)
        if trend is None:
            if len(self._trends) < _MAX_TRENDS:
                self._trends[place] = LossTrend(loss)
            return False
        usual = trend.usual
        rises = trend.note(loss)
        if rises:
            self._jumps.note(loss, usual, self._departure)
        self.lost_updates = trend.lost
        enough = _UPDATES_OF_LOST_TRAINING if loss >= 0 else _UPDATES_OF_LOST_BELOW_ZERO
        self.is_lost = self.is_lost or trend.lost >= enough
        ceiling = RISE * trend.usual
        is_alone = len(self._trends) == 1 or loss < 0  # a loss of several may rise because another falls, as of a GAN
        if is_alone and not self.is_far:
            self._note_far(max(trend.far, trend.stuck // _UPDATES_PER_STUCK))
            # 0: every loss is looked at, as the answer must not depend on the time that there is to look.
            ceiling *= not (trend.far or trend.stuck or self._jumps.updates_left)
        if ceiling > self.ceiling or is_alone:
            self.ceiling = min(ceiling, trend.limit)
        if not self.is_lost and any(each.lost for each in self._trends.values()):
            self.ceiling = 0.0  # whether training is lost must not depend on the time that there is to look
        begins = rises or trend.lost == 1
        if begins and self._rises < _MAX_RISES:
            self.is_open, self._in_any_case = True, _UPDATES_OF_RISE
        return begins

    def forget_far(self) -> None:
        """The loss that left its level was asked about: what was kept for that is no longer needed."""
        self._pinned = self._jumps.windows = []

    def _note_far(self, updates: int) -> None:
        """Keep what shows how the loss left its level, until it is clear whether the loss comes back."""
        if updates == _UPDATES_OF_LOST_TRAINING and not self._pinned:
            self._pinned = self._departure()
        elif not updates:
            self._pinned = []
        self.has_left = updates >= _UPDATES_OF_LOST_TRAINING
        self.is_far = updates >= _UPDATES_OF_FAR_LOSS

    # Copies

    def _consider(self, optimizers: Callable[[], list[Any]], update: int, rises: bool) -> None:
        """Take a copy if one is due."""
        if self.refused:
            return
        if self._rewind.given_up:
            self._refuse("memory was scarce")
        elif self._start is None and update == 0:
            self._start = self._take(optimizers(), update)
        elif rises:
            if update - self._last_rise > _UPDATES_OF_RISE and self._rises < _MAX_RISES:
                self._last_rise = update
                self._rises += 1
                self._risen = self._take(optimizers(), update)
        elif self._is_due(update):
            self._last_copy = update
            while len(self._copies) >= _LATE_COPIES:
                self._copies.popleft()  # so that the next copy finds its memory free
            copy = self._take(optimizers(), update)
            if copy is not None:
                self._copies.append(copy)
        if update > _FIRST_KEPT_UPDATES and self._first:
            self._first, self._start = [], None

    def _is_due(self, update: int) -> bool:
        """Whether it is time for a further copy. How long a late device takes for one is not known here."""
        is_old = update - self._last_copy >= _UPDATES_BETWEEN_COPIES
        account = self._account
        return is_old and not self.is_late and account.left > min(self._copy_seconds, account.full / 2)

    def _take(self, optimizers: list[Any], update: int) -> Copy | None:
        started = thread_time()
        leaves = [leaf for reference in self._leaves if (leaf := reference()) is not None] if not optimizers else []
        weights = [each for each in (*leaves, *parameters_of(*optimizers)) if is_plain(each)]
        if not weights:
            return None
        tensors = {id(tensor): tensor for tensor in [*weights, *self._rewind.buffers(weights)]}
        try:
            return take_copy(optimizers, list(tensors.values()), update)
        except NoRoom as reason:
            self._refuse(str(reason))
            return None
        finally:
            self._copy_seconds = thread_time() - started
            self._account.spend(self._copy_seconds)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._start = self._risen = None
        self._copies.clear()
        self._first.clear()
        self._pinned = self._jumps.windows = []
