"""The HTML of a page: one file that needs no network, and holds its data as one block of JSON."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape
from msgspec.structs import replace

from torchmedic.diagnose.words.format import at_moment
from torchmedic.records import Diagnosis, Location, Report, Treatment, encode_line
from torchmedic.records.plain_text import clipped, visible, visible_json
from torchmedic.report.html import charts, run_data, views
from torchmedic.report.html.run_data import RunData
from torchmedic.runfolder import files

MAX_BYTES = 500_000
# Bytes of the report, which escaping can multiply, and processes that are drawn.
_BUDGETS = ((120_000, 4), (60_000, 4), (25_000, 2), (8_000, 1))
_HERE = Path(__file__).parent
_CODE = re.compile(r"`([^`]+)`")
_MAX_DIAGNOSES = 20
_MAX_EVIDENCE = 40
_MAX_LOCATIONS = 20
_MAX_TREATMENTS = 10


def write(run: Path) -> None:
    """Write `report.html` if something was found, and update an existing one.

    Raises:
        UnreadableRun: There is no report, or it is damaged.
        OSError: The page cannot be written.
    """
    data = run_data.read(run)
    told = any(diagnosis.severity != "note" for diagnosis in data.report.diagnoses)
    if told or (run / files.HTML).exists():
        files.write_atomically(run / files.HTML, render(data))


def render(data: RunData) -> bytes:
    """The page, below `MAX_BYTES`: texts are cut shorter until it is."""
    text = b""
    for budget, pictured in _BUDGETS:
        report, left_out = bounded(data.report, budget)
        calls = {number: call for number, call in data.calls.items() if len(call) <= budget // 4}
        page = views.build(msgspec.structs.replace(data, calls=calls), report, left_out, pictured)
        text = _document(page, _json(page, report)).encode()
        if len(text) <= MAX_BYTES:
            break
    return text


def _document(page: views.Page, data: Markup) -> str:
    library = _vendored("uPlot.iife.min.js") if page.curves else ""
    script = f"{library}\n{_text('templates/page.js')}" if library else _text("templates/page.js")
    style = (_vendored("uPlot.min.css") if page.curves else "") + _text("templates/page.css")
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            data=data,
            # Both are files of ours, never text of the run.
            script=Markup(script),
            style=Markup(style),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    return visible(text)  # wherever in the page it stands


def _json(page: views.Page, report: Any) -> Markup:
    """Data for other tools and for the curves. Nothing in it can end the element that it stands in."""
    record = {
        "schema": 1,
        "run": page.name,
        "report": report,
        "curves": [curve for _, curve, _ in page.curves],
        "steps": [strip for _, strip, _ in page.strips],
        "memory": [picture.block for picture in page.splits],
        "waits": [picture.waiters for picture in page.waits],
    }
    return Markup(visible_json(encode_line(record).decode(), in_html=True))


def prose(text: str) -> Markup:
    """Text of the run with its `code` set as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": prose, "size": charts.size, "duration": charts.duration, "moment": at_moment}
    return environment


@cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    """A file of uPlot, with the licence in the place of its first comment, which names an address."""
    body = re.sub(r"\A/\*!.*?\*/\s*", "", _text(f"vendor/uplot/{name}"))
    return f"/*! uPlot 1.6.32\n{_text('vendor/uplot/LICENSE')}*/\n{body}"


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
