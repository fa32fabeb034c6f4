"""Bounds of the report on the page: long texts are cut, and only the first diagnoses are shown."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from torchmedic.records import Diagnosis, Location, Report, Treatment
from torchmedic.report.visible import clipped

_MAX_DIAGNOSES = 20
_MAX_EVIDENCE = 40
_MAX_LOCATIONS = 20
_MAX_TREATMENTS = 10


def bounded(report: Report, budget: int) -> tuple[Report, int]:
    """The part of a report that takes about `budget` bytes, and how many diagnoses were left out.

    The first diagnosis is always part of it.
    """
    field = max(40, budget // 40)
    kept: list[Diagnosis] = []
    used = 0
    for diagnosis in report.diagnoses[:_MAX_DIAGNOSES]:
        short = _short(diagnosis, field)
        used += len(msgspec.json.encode(short))
        if kept and used > budget:
            break
        kept.append(short)
    return replace(report, diagnoses=tuple(kept)), len(report.diagnoses) - len(kept)


def _short(diagnosis: Diagnosis, field: int) -> Diagnosis:
    return replace(
        diagnosis,
        code=clipped(diagnosis.code, 200),
        name=clipped(diagnosis.name, 200),
        message=clipped(diagnosis.message, field),
        cause=clipped(diagnosis.cause, field),
        locations=tuple(_short_place(place, field) for place in diagnosis.locations[:_MAX_LOCATIONS]),
        evidence=tuple(clipped(fact, field) for fact in diagnosis.evidence[:_MAX_EVIDENCE]),
        treatments=tuple(_short_cure(each, field) for each in diagnosis.treatments[:_MAX_TREATMENTS]),
    )


def _short_place(place: Location, field: int) -> Location:
    return replace(
        place, file=clipped(place.file, 400), code=clipped(place.code, field), label=clipped(place.label, field)
    )


def _short_cure(treatment: Treatment, field: int) -> Treatment:
    # Half a patch is no patch.
    patch = treatment.patch if len(treatment.patch) <= 2 * field else ""
    return replace(
        treatment, title=clipped(treatment.title, field), result=clipped(treatment.result, field), patch=patch
    )
