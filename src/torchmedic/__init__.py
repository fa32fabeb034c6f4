"""torchmedic: the cause, the line and the evidence when a PyTorch training step fails."""

from torchmedic.records import Diagnosis, Location, Outcome, Report, Treatment

__all__ = ["Diagnosis", "Location", "Outcome", "Report", "Treatment", "__version__"]

__version__ = "0.1.0"
