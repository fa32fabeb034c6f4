"""Run folders made by hand, with everything that a page can show."""

from __future__ import annotations

from msgspec.structs import replace

from torchmedic.records import BoxContents, Diagnosis, Location, Moment, Outcome, Phase, Report, Treatment
from torchmedic.records.inside import InsideView, LockView, PyFrame, PyThread
from torchmedic.records.memory import HeldMemory
from torchmedic.records.numbers import NumberTrace, PathNode, TriedCure
from torchmedic.records.stall import Stall
from torchmedic.report.html.run_data import (
    Autopsy,
    AutopsyLine,
    CurveLine,
    Event,
    Holders,
    MemoryLine,
    Process,
    RunData,
    TorchSettings,
)

ORDER: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


def box(steps: int, start: float = 100.0, seconds: float = 0.01) -> BoxContents:
    """Each step has four phases of the same length."""
    moments = [
        Moment(
            time=start + (4 * step + number) * seconds,
            step=step,
            micro_step=0,
            updates=step,
            phase=phase,
            file="train.py",
            line=3,
            rss=(100 + step) << 20,
            device_memory=0,
        )
        for step in range(steps)
        for number, phase in enumerate(ORDER)
    ]
    return BoxContents(pid=7, started=start - 1, clean_exit=False, moments=tuple(moments))


def points(first: int, last: int) -> list[tuple[float | None, ...]]:
    """A loss that falls, a rate that is halved every 100 steps, and a gradient norm at every other step."""
    return [
        (step, 2.0 - step / 1000, 0.1 * 0.5 ** (step // 100), None if step % 2 else 3.0 + step % 7, 0)
        for step in range(first, last)
    ]


def diagnosis(text: str = "some text", **changed: object) -> Diagnosis:
    """A diagnosis whose every text is `text`."""
    place = Location(role="cause", file=text, line=3, column=5, end_column=9, code=text, indent=4, label=text)
    patch = f"--- {text}\n+++ {text}\n@@ -3 +3 @@\n-{text}\n+{text}\n"
    made = Diagnosis(
        code=text,
        name=text,
        grade="proven",
        message=text,
        cause=text,
        step=12,
        locations=(place, replace(place, role="origin", line=9), replace(place, role="surfaced", file=f"{text}2")),
        evidence=(text, text),
        treatments=(Treatment(title=text, proven=True, result=text, patch=patch), Treatment(title=text)),
    )
    return replace(made, **changed)


def whole(text: str = "some text") -> RunData:
    """A run with everything that a page can show; every text in it is `text`."""
    one = LockView(identity=1, kind="lock", name=text)
    two = LockView(identity=2, kind="lock", name=text)
    frame = PyFrame(file=text, line=4, function=text, user=True, code=text)
    threads = (
        PyThread(ident=1, name="MainThread", main=True, frames=(frame,), waits_for=one, holds=(two,)),
        PyThread(ident=2, name=text, frames=(frame,), waits_for=two, holds=(one,)),
    )
    process = Process(
        name=text,
        pid=7,
        python=text,
        torch=text,
        cuda=text,
        box=box(30),
        memory=tuple(MemoryLine(time=100.0 + number, rss=number << 20, allocated=5) for number in range(10)),
        autopsies=(
            Autopsy(
                time=109.0,
                where="host",
                asked=1 << 20,
                total=1000,
                rows={"saved activations": 600, text: 400},
                lines=(AutopsyLine(nbytes=500, file=text, line=3),),
            ),
        ),
        holders=(Holders(time=108.0, holders=(HeldMemory(name=text, nbytes=5, items=2, file=text, line=3),)),),
        curves=tuple(
            CurveLine(time=101.0 + part, places=(f"/w/{text}:3",), points=tuple(points(100 * part, 100 * part + 100)))
            for part in range(3)
        ),
        traces=(
            NumberTrace(
                code=text,
                step=12,
                path=(
                    PathNode(operation=text, role="birth", made="nan", given=(1.0, None), file=text, line=3, code=text),
                    PathNode(operation=text, backward=True, made="nan", skipped=4),
                    PathNode(operation="loss", role="end", made="nan"),
                ),
                tried=(
                    TriedCure(title=text, result=text, patch=f"--- {text}\n+++ {text}\n@@ -3 +3 @@\n-{text}\n+{text}"),
                ),
            ),
        ),
        settings=(TorchSettings(time=109.0, values={text: text}),),
        events=(Event(kind="start", time=99.5, text=text), Event(kind="exception", time=109.0, step=12, text=text)),
    )
    return RunData(
        name=text,
        report=Report(
            outcome=Outcome(exit_status=1, signal=text, steps=30, symptom=text),
            diagnoses=(diagnosis(text), diagnosis(text, severity="warning"), diagnosis(text, severity="note")),
        ),
        processes=(process, replace(process, name=f"{text} again", rank=1)),
        stalls=(Stall(pid=7, still=5.0, limit=4.0, inside={7: InsideView(pid=7, time=1.0, threads=threads)}),),
        calls={0: text},
        settings={text: text},
    )
