"""A report as SARIF 2.1.0, the format that GitHub code scanning and editors read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import msgspec

from torchmedic import __version__
from torchmedic.diagnose import catalogue
from torchmedic.records import Diagnosis, Location, Report, Treatment
from torchmedic.records.plain_text import visible
from torchmedic.report.frames import Hunk, hunks

_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def document(report: Report, shown: Iterable[Diagnosis]) -> str:
    """One SARIF log with one run."""
    found = list(shown)
    codes = sorted({diagnosis.code for diagnosis in found})
    status = report.outcome.exit_status
    invocation: dict[str, Any] = {"executionSuccessful": status == 0}
    if status is not None:
        invocation["exitCode"] = status
    if report.outcome.signal:
        invocation["exitSignalName"] = visible(report.outcome.signal)
    run = {
        "tool": {"driver": {"name": "torchmedic", "version": __version__, "rules": [_rule(code) for code in codes]}},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"SRCROOT": {"description": {"text": "the working directory of the run"}}},
        "results": [_result(diagnosis, codes.index(diagnosis.code)) for diagnosis in found],
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=2).decode() + "\n"


def _rule(code: str) -> dict[str, Any]:
    entry = catalogue.find(code)
    if entry is None:  # a report of another version
        return {"id": visible(code)}
    return {
        "id": entry.code,
        "name": "".join(part.capitalize() for part in entry.name.split("-")),
        "shortDescription": {"text": entry.summary},
        "fullDescription": {"text": entry.doc},
        "help": {"text": entry.doc},
    }


def _result(diagnosis: Diagnosis, index: int) -> dict[str, Any]:
    primary = diagnosis.cause_location or next(iter(diagnosis.locations), None)
    related = [place for place in diagnosis.locations if place is not primary]
    result: dict[str, Any] = {
        "ruleId": visible(diagnosis.code),
        "ruleIndex": index,
        "level": _LEVELS[diagnosis.severity],
        "message": {"text": visible(f"{diagnosis.message} ({diagnosis.grade}: {diagnosis.cause})")},
        "partialFingerprints": {"torchmedic/v1": _fingerprint(diagnosis, primary)},
        "properties": {
            "grade": diagnosis.grade,
            "step": diagnosis.step,
            "rank": diagnosis.rank,
            "evidence": [visible(fact) for fact in diagnosis.evidence],
        },
    }
    if primary is not None:
        result["locations"] = [_location(primary)]
    if related:
        result["relatedLocations"] = [{"id": number, **_location(place)} for number, place in enumerate(related)]
    fixes = [fix for treatment in diagnosis.treatments if (fix := _fix(treatment)) is not None]
    if fixes:
        result["fixes"] = fixes
    return result


def _location(place: Location) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(1, place.line)}
    if place.end_column > place.column:
        region |= {"startColumn": place.column, "endColumn": place.end_column}
    if place.code:
        region["snippet"] = {"text": visible(place.code)}
    found: dict[str, Any] = {"physicalLocation": {"artifactLocation": _artifact(place.file), "region": region}}
    if place.label:
        found["message"] = {"text": visible(place.label)}
    return found


def _artifact(file: str) -> dict[str, Any]:
    uri = quote(file, safe="/", errors="replace")
    if file.startswith("/"):
        return {"uri": f"file://{uri}"}
    return {"uri": uri, "uriBaseId": "SRCROOT"}


def _fix(treatment: Treatment) -> dict[str, Any] | None:
    changes: dict[str, list[dict[str, Any]]] = {}
    for hunk in hunks(treatment.patch):
        changes.setdefault(hunk.file, []).append(_replacement(hunk))
    if not changes:
        return None
    return {
        "description": {"text": visible(treatment.title)},
        "artifactChanges": [
            {"artifactLocation": _artifact(file), "replacements": replacements}
            for file, replacements in changes.items()
        ],
    }


def _replacement(hunk: Hunk) -> dict[str, Any]:
    """Whole lines: the region ends at the first column of the line after the last one that is removed."""
    start = hunk.start if hunk.removed else hunk.start + 1
    end = start + len(hunk.removed)
    region = {"startLine": max(1, start), "startColumn": 1, "endLine": max(1, end), "endColumn": 1}
    text = "".join(f"{change.text}\n" for change in hunk.added)
    return {"deletedRegion": region, "insertedContent": {"text": text}}


def _fingerprint(diagnosis: Diagnosis, primary: Location | None) -> str:
    """An identifier of the finding that stays the same when lines above it are added or removed."""
    place = f"{primary.file}\n{primary.code or primary.line}" if primary is not None else ""
    return hashlib.sha256(f"{diagnosis.code}\n{place}".encode(errors="replace")).hexdigest()[:32]
