"""What may be written down of a diagnosis when neither source nor values may be."""

from __future__ import annotations

from msgspec.structs import replace

from torchmedic.records import Diagnosis, Treatment


def confidential(diagnosis: Diagnosis) -> Diagnosis:
    """The code, the grade and the places; no source text, and nothing that was read from the user's data."""
    return replace(
        diagnosis,
        message=diagnosis.name.replace("-", " "),
        cause="left out, as the run was started with --confidential",
        locations=tuple(replace(place, code="", label="") for place in diagnosis.locations),
        evidence=(),
        treatments=tuple(_bare(treatment) for treatment in diagnosis.treatments),
    )


def _bare(treatment: Treatment) -> Treatment:
    return replace(treatment, title="a cure was tried" if treatment.proven else "see explain", result="", patch="")
