"""Where the nodes of an autograd graph were built: the user's line, the layer, and the loss function around it.

torch asks `torch.fx.traceback.format_stack` for the stack of every node that it builds in anomaly mode. For one forward
pass that mode is on, without its checks, and the question is answered here, by a few numbers instead of a page of text.
Nothing else sees a difference: no operation is intercepted, no tensor is held, and tracebacks stay as they are. Where
no graph is built, nothing is asked and nothing is spent.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.contained import contained, report_fault
from torchmedic.observe.checkup.differences import Differences, Operand, is_plain, sequence_of
from torchmedic.observe.exchanged import Exchanged
from torchmedic.source.objects.graph import packs_saved_tensors
from torchmedic.source.user_code import is_user_file

LOSSES = frozenset(
    "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss "
    "huber_loss kl_div ctc_loss".split()
)
_MAX_FRAMES = 120  # that are walked
_MAX_USER_FRAMES = 6  # that are kept
_MAX_NODES = 60_000  # as of a script that never calls backward
_FUNCTIONAL = torch.nn.functional.__file__
_DISTRIBUTIONS = torch.distributions.__file__.removesuffix("__init__.py")


class LossCall:
    """One call of a loss function of torch's, with what it was given. Values are read later, if its target lives."""

    def __init__(
        self,
        name: str,
        given: torch.Tensor,
        target: torch.Tensor,
        sites: tuple[Site, ...],
        *,
        is_weighted: bool = False,
    ) -> None:
        self.name = name
        self.is_weighted = is_weighted  # elements of the target may count nothing
        self.sites = sites
        self.shape = tuple(given.shape)
        self.target_shape = tuple(target.shape)
        self.target = weakref.ref(target)
        self.sequence = sequence_of(given)  # of the node that made the input; None for a leaf


class Site(NamedTuple):
    """An instruction of the user's."""

    code: CodeType
    lasti: int


class Birth(list[str]):
    """Where one node was built.

    A list, and empty, for those who take it for lines of text: torch does when anomaly mode is on in backward.
    """

    __slots__ = ("layer", "loss", "method", "operands", "sites")

    def __init__(self) -> None:
        super().__init__()
        self.sites: tuple[Site, ...] = ()  # innermost first
        self.layer: weakref.ref[torch.nn.Module] | None = None  # a library's, below the user's innermost line
        self.loss: LossCall | None = None
        self.method = ""  # of a distribution of torch's, below the user's innermost line
        self.operands: tuple[Operand | None, Operand | None] | None = None  # of `a - b`, where it is known


class _Answer:
    """Stands for a question of torch's while its answer would be about us. Pickled as the original."""

    def __init__(self, name: str, answer: bool) -> None:
        self._name = name
        self._answer = answer

    def __call__(self) -> bool:
        return self._answer

    def __reduce__(self) -> tuple[Any, ...]:
        import pydoc  # 3 ms that nobody else needs

        return pydoc.locate, (f"torch.{self._name}",)


class NodeBirths:
    """Notes the births of nodes while it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.refused = False  # compiled code, or somebody else's anomaly mode: never again
        self.has_hooks = False  # saved tensors are not what they seem: to read one may compute it again
        self.has_distributions = False  # a node was built by `torch.distributions`
        self.layers: dict[int, tuple[weakref.ref[torch.nn.Module], Birth]] = {}  # that built nodes
        self._count = 0
        self._modes = 0
        self._patches = Exchanged()
        self._loss: LossCall | None = None
        self._differences = Differences()

    def arm(self, *, modes: int = 0) -> bool:
        """Begin to note; False where that would disturb another tool.

        Args:
            modes: Dispatch modes of our own that are on, as in a replay.
        """
        if self.armed or self.refused:
            return self.armed
        self._modes = modes
        traces = __import__("torch.fx.traceback", fromlist=["*"])
        if torch.is_anomaly_enabled() or not hasattr(traces, "format_stack"):
            self.refused = torch.is_anomaly_enabled()
            return False
        self.has_hooks = packs_saved_tensors()
        self.layers, self._count, self.has_distributions = {}, 0, False
        self._patches.put(traces, "format_stack", self._answering(traces.format_stack))
        self._patches.put(
            torch._C._autograd,
            "_push_saved_tensors_default_hooks",
            self._noticing(torch._C._autograd._push_saved_tensors_default_hooks),
        )
        for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
            self._patches.put(kind, "__init__", self._giving_way(kind.__init__))
        # The mode is ours: for all others it is off, as they have set it.
        for name in ("is_anomaly_enabled", "is_anomaly_check_nan_enabled"):
            self._patches.put(torch, name, _Answer(name, getattr(torch, name)()))
        self.armed = True
        torch.set_anomaly_enabled(True, False)
        return True

    def disarm(self) -> None:
        """Leave torch as it was."""
        if not self.armed:
            return
        self.armed = False
        self._loss = None
        self._patches.take_back()
        if torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled():
            torch.set_anomaly_enabled(False, True)

    def refuse(self) -> None:
        """Stop for good: something runs that must not be disturbed."""
        self.refused = True
        self.disarm()

    def _noticing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _push_saved_tensors_default_hooks(*args: Any) -> Any:
            self.has_hooks = True
            return original(*args)

        return _push_saved_tensors_default_hooks

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        give_way = contained("observe.checkup")(self.refuse)
        step_aside = contained("observe.checkup")(self.disarm)
        come_back = contained("observe.checkup")(self.arm)

        def __init__(mode: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(mode, torch.autograd.set_detect_anomaly) and args[:1] == (False,):
                step_aside()  # it is only made sure that it is off
                original(mode, *args, **kwargs)
                come_back()
                return
            give_way()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                original(mode, *args, **kwargs)
            for warning in caught:  # it names the line that called, which must not be ours
                warnings.warn(warning.message, stacklevel=2)

        return __init__

    def _answering(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def format_stack() -> Any:
            if not self.armed or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > self._modes:
                return original()
            try:
                return self._birth(sys._getframe().f_back)  # None in a thread without Python, such as those of gloo
            except Exception as error:
                self.refuse()
                report_fault("observe.checkup", error)
                return Birth()

        return format_stack

    def _birth(self, frame: FrameType | None) -> Birth:
        birth = Birth()
        self._count += 1
        if self._count > _MAX_NODES:
            self.refuse()
            return birth
        direct = True  # no library between the operation and the user's line
        sites: list[Site] = []
        layer: torch.nn.Module | None = None
        for _ in range(_MAX_FRAMES):
            if frame is None or len(sites) >= _MAX_USER_FRAMES:
                break
            code = frame.f_code
            if is_user_file(code.co_filename):
                site = Site(code, frame.f_lasti)
                if direct and not sites:
                    birth.operands = self._differences.operands(code, frame)
                sites.append(site)
            elif not sites:
                direct = False
                if code.co_filename.startswith(_DISTRIBUTIONS):
                    self.has_distributions = True
                    birth.method = code.co_name
                if layer is None and code.co_name == "forward":
                    layer = _owner(frame)
                elif code.co_name in LOSSES and code.co_filename == _FUNCTIONAL:
                    birth.loss = self._loss_call(frame)
            frame = frame.f_back
        birth.sites = tuple(sites)
        if birth.loss is not None and not birth.loss.sites:
            birth.loss.sites = birth.sites
        if layer is not None:
            birth.layer = weakref.ref(layer)
            self.layers.setdefault(id(layer), (birth.layer, birth))
        return birth

    def _loss_call(self, frame: FrameType) -> LossCall | None:
        given, target, weight, *of_ctc = _locals(frame, "input", "target", "weight", "log_probs", "targets")
        given, target = (given, target) if given is not None else of_ctc
        if not (is_plain(given) and is_plain(target)):
            return None
        known, name = self._loss, frame.f_code.co_name
        # Several nodes are built in one call of a loss.
        if known is None or known.name != name or known.target() is not target or known.sequence != sequence_of(given):
            known = self._loss = LossCall(name, given, target, (), is_weighted=weight is not None)
        return known


def _locals(frame: FrameType, *names: str) -> list[Any]:
    """Variables of a running function of a library's."""
    values = frame.f_locals
    found = [values.get(name) for name in names]
    if sys.version_info < (3, 13):
        values.clear()  # a copy kept by the frame, which would hold every tensor past its time
    return found


def _owner(frame: FrameType) -> torch.nn.Module | None:
    owner = _locals(frame, "self")[0]
    return owner if isinstance(owner, torch.nn.Module) else None
