"""Colours of a diagnosis: the source is as plain as it is in a file."""

from __future__ import annotations

from torchmedic.records import Diagnosis, Location, Treatment
from torchmedic.report import terminal
from torchmedic.report.console import recording_console

FOUND = Diagnosis(
    code="TM201",
    name="division-by-zero",
    grade="proven",
    message="division by zero",
    cause="one divisor is 0",
    locations=(Location(role="cause", file="train.py", line=3, column=1, end_column=6, code="y = 1 / x"),),
    treatments=(Treatment(title="add a small constant", patch="--- a\n+++ a\n@@ -3 +3 @@\n-y = 1 / x\n+y = 2\n"),),
)


def test_only_the_gutter_marks_and_changes_have_a_colour() -> None:
    console = recording_console(80)
    terminal.print_all(console, [FOUND], "full", None)
    plain = {span.text.strip() for span in console._record_buffer if span.style is None or span.style.color is None}
    coloured = {span.text.strip() for span in console._record_buffer if span.style and span.style.color}

    assert {"y = 1 / x", "train.py:3:1", "one divisor is 0", "proven:"} <= plain
    assert {"error[TM201]:", "3 |", "-->", "help:", "- y = 1 / x", "+ y = 2"} <= coloured
