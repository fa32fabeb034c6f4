"""Diagnoses for experiment trackers."""

from torchmedic.records import Diagnosis


def tell(diagnosis: Diagnosis) -> None: ...
