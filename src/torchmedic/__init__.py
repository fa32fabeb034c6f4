"""torchmedic: the cause, the line and the evidence when a PyTorch training step fails."""

from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torchmedic._isolated import leave_working_folder as _leave_working_folder

_leave_working_folder()  # before anything else is imported

import torchmedic.diagnose as _diagnose_package  # noqa: E402
from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment  # noqa: E402

if _TYPE_CHECKING:
    from torchmedic.diagnose.catalogue import explain
    from torchmedic.examine.unit_check import checkup
    from torchmedic.fit.api import assert_fits, predict
    from torchmedic.integrations.api import Watch, diagnose, watch
    from torchmedic.recovery.install import recover

__all__ = [
    "Diagnosis",
    "Location",
    "Outcome",
    "Report",
    "Treatment",
    "Watch",
    "__version__",
    "assert_fits",
    "checkup",
    "diagnose",
    "explain",
    "predict",
    "recover",
    "watch",
]

__version__ = "0.1.0"

# Names that are imported when they are used: most need torch, which those who only read reports may not have.
_LATE = {
    "Watch": "torchmedic.integrations.api",
    "assert_fits": "torchmedic.fit.api",
    "checkup": "torchmedic.examine.unit_check",
    "explain": "torchmedic.diagnose.catalogue",
    "recover": "torchmedic.recovery.install",
    "load_ipython_extension": "torchmedic.integrations.notebook",
    "unload_ipython_extension": "torchmedic.integrations.notebook",
    "predict": "torchmedic.fit.api",
    "watch": "torchmedic.integrations.api",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)


class _CallablePackage(_ModuleType):
    """The package `torchmedic.diagnose`, which is also the function of that name."""

    def __call__(self, error: BaseException) -> Diagnosis | None:
        from torchmedic.integrations.api import diagnose

        return diagnose(error)


_diagnose_package.__class__ = _CallablePackage
