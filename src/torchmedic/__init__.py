"""torchmedic: the cause, the line and the evidence when a PyTorch training step fails."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from torchmedic._isolated import leave_working_folder as _leave_working_folder

_leave_working_folder()  # before anything else is imported

from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment  # noqa: E402

if _TYPE_CHECKING:
    from torchmedic.examine.unit_check import checkup

__all__ = ["Diagnosis", "Location", "Outcome", "Report", "Treatment", "__version__", "checkup"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "checkup":  # needs torch, which those who only read reports may not have
        from torchmedic.examine.unit_check import checkup

        return checkup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
