"""The accuracy of cause and line: torchmedic against anomaly mode, on the same failing scripts.

    python benchmarks/accuracy.py [--shapes-per-failure 4] [--all] [--output benchmarks/results/accuracy.md]

Every failure of accuracy_set/failures.py is combined with several loop shapes of accuracy_set/shapes.py. A diagnosis
counts only if its code is right and its cause is the marked line. Any diagnosis of a healthy twin counts as a false
alarm. Anomaly mode counts if the last line that it names is the marked one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from accuracy_set.failures import FAILURES  # noqa: E402
from accuracy_set.shapes import PRELUDE, SHAPES  # noqa: E402
from running import marked_line, run_script  # noqa: E402


class Case(NamedTuple):
    failure: str
    shape: str
    codes: tuple[str, ...]
    fails: str
    passes: str

    @property
    def line(self) -> int:
        return marked_line(self.fails)


class Score(NamedTuple):
    case: Case
    found: str
    right: bool
    false_alarm: str
    anomaly: str
    anomaly_right: bool


def cases(per_failure: int, every: bool) -> Iterator[Case]:
    shapes = list(SHAPES)
    for number, (name, failure) in enumerate(FAILURES.items()):
        # A different selection for each failure, so that each shape is combined with many failures.
        chosen = shapes if every else [shapes[(number * 3 + 5 * turn) % len(shapes)] for turn in range(per_failure)]
        for shape in dict.fromkeys(chosen):
            if shape in failure.not_in:
                continue
            yield Case(
                name,
                shape,
                failure.codes,
                PRELUDE + failure.fails + SHAPES[shape],
                PRELUDE + failure.passes + SHAPES[shape],
            )


def examine(case: Case, *, with_anomaly: bool) -> Score:
    with tempfile.TemporaryDirectory() as folder:
        finished = run_script(Path(folder), case.fails)
        diagnoses = finished.report.diagnoses
    places = [(found.code, found.cause_location.line if found.cause_location else None) for found in diagnoses]
    right = len(places) == 1 and places[0][0] in case.codes and places[0][1] == case.line
    said = ", ".join(f"{code}:{at}" for code, at in places) or "nothing"
    with tempfile.TemporaryDirectory() as folder:
        twin = run_script(Path(folder), case.passes)
        alarms = ", ".join(found.code for found in twin.report.diagnoses)
    if twin.returncode != 0:
        alarms = alarms or f"exit {twin.returncode}"
    named = anomaly_line(case.fails) if with_anomaly else None
    return Score(case, f"{said} (line {case.line})", right, alarms, str(named), named == case.line)


def anomaly_line(source: str) -> int | None:
    """The last line of the script that anomaly mode, or else the exception, names."""
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder, "train.py"), Path(folder, "log")
        script.write_text(source)
        pid = os.fork()
        if pid == 0:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.argv = [str(script)]
            torch.autograd.set_detect_anomaly(True)
            try:
                exec(compile(source, str(script), "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        text = log.read_text()
        named = re.findall(rf'File "{re.escape(str(script))}", line (\d+)', _forward_part(text) or text)
        return int(named[-1]) if named else None


def _forward_part(text: str) -> str | None:
    """The text that anomaly mode adds: the stack of the forward call."""
    start = text.find("Traceback of forward call")
    return text[start : text.find("(Triggered internally", start)] if start >= 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes-per-failure", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="every failure in every shape")
    parser.add_argument("--only", default="", help="failures whose name holds this")
    parser.add_argument("--no-anomaly", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # once, before the forks

    scores = []
    for case in cases(args.shapes_per_failure, args.all):
        if args.only not in case.failure:
            continue
        score = examine(case, with_anomaly=not args.no_anomaly)
        scores.append(score)
        mark = "ok   " if score.right and not score.false_alarm else "WRONG"
        print(
            f"{mark} {case.failure:24} {case.shape:24} {score.found:28} twin: {score.false_alarm or 'silent'}",
            flush=True,
        )
    lines = summary(scores)
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


def summary(scores: list[Score]) -> list[str]:
    total = len(scores)
    lines = [
        f"# Accuracy: {total} failing scripts, {len({score.case.shape for score in scores})} loop shapes, "
        f"{total} healthy twins",
        "",
        f"torch {torch.__version__}, `python benchmarks/accuracy.py {' '.join(sys.argv[1:])}`",
        "",
        "| failure | scripts | torchmedic: cause and line | false alarms on twins | anomaly mode: line |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(score.case.failure for score in scores):
        group = [score for score in scores if score.case.failure == name]
        lines.append(
            f"| {name} | {len(group)} | {sum(score.right for score in group)} | "
            f"{sum(bool(score.false_alarm) for score in group)} | {sum(score.anomaly_right for score in group)} |"
        )
    lines.append(
        f"| **all** | {total} | {sum(score.right for score in scores)} | "
        f"{sum(bool(score.false_alarm) for score in scores)} | {sum(score.anomaly_right for score in scores)} |"
    )
    return lines


if __name__ == "__main__":
    main()
