"""An exchange of gradients that is not complete at an update is noticed; one that was waited for is not."""

from __future__ import annotations

import sys

import torch

from torchmedic.observe.ranks.underway import Underway


class Work:
    """What a collective returns."""

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.1)


def gradient(of: torch.optim.Optimizer) -> torch.Tensor:
    found = of.param_groups[0]["params"][0].grad
    assert found is not None
    return found


def test_an_exchange_that_is_not_complete() -> None:
    update, calls = optimizer(), Underway()
    calls.begun(Work(done=False), [gradient(update)], sys._getframe())
    found = calls.at_update(update)
    assert found is not None
    assert found.file == __file__
    assert calls.at_update(update) is None  # told of one update


def test_what_is_complete_or_no_gradient_is_left_alone() -> None:
    update, calls = optimizer(), Underway()
    late = Work(done=False)
    calls.begun(late, [gradient(update)], sys._getframe())
    late.done = True
    calls.begun(Work(done=False), [torch.ones(3)], sys._getframe())
    calls.begun(None, [gradient(update)], sys._getframe())
    assert calls.at_update(update) is None


def test_an_update_that_may_wait_itself_is_left_alone() -> None:
    hooked, calls = optimizer(), Underway()
    hooked.register_step_pre_hook(lambda *_: None)
    calls.begun(Work(done=False), [gradient(hooked)], sys._getframe())
    assert calls.at_update(hooked) is None

    class Waiting(torch.optim.SGD):
        """Waits for all exchanges in `step`, as Horovod does."""

    own = Waiting(optimizer().param_groups[0]["params"], lr=0.1)
    calls.begun(Work(done=False), [gradient(own)], sys._getframe())
    assert calls.at_update(own) is None


class Done:
    def done(self) -> bool:
        return True


def test_a_future_that_was_waited_for_is_enough() -> None:
    update, calls, work = optimizer(), Underway(), Work(done=False)
    work.get_future = Done  # type: ignore[attr-defined]
    calls.begun(work, [gradient(update)], sys._getframe())
    assert calls.at_update(update) is None
