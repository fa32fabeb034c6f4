"""A prediction on the terminal, as JSON, and its best plan as a diff."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import msgspec
from rich.table import Table

from torchmedic.fit.cards import size_text
from torchmedic.records.fit import Line, Need, Plan, Prediction
from torchmedic.report.console import stdout_console

_MAX_PLANS = 8


def as_json(prediction: Prediction) -> str:
    content = msgspec.to_builtins(prediction) | {"fits": prediction.fits}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def table(prediction: Prediction) -> None:
    """Print the prediction."""
    console = stdout_console()
    need = prediction.need
    console.print(
        f"peak allocated {size_text(need.allocated)}, reserved {size_text(need.reserved)}, "
        f"with the CUDA context {size_text(need.total)}",
        soft_wrap=True,
    )
    console.print(f"peak in {prediction.phase}, {_place(prediction.line)}", soft_wrap=True)
    if prediction.memory is not None:
        verdict = "fits" if prediction.fits else "does not fit"
        missing = need.total - prediction.memory
        how = f"{size_text(-missing)} left" if prediction.fits else f"{size_text(max(missing, 0))} too much"
        name = (
            f"{prediction.card} ({size_text(prediction.memory)})" if "card" not in prediction.card else prediction.card
        )
        console.print(f"{verdict} {name}: {how}", style="green" if prediction.fits else "bold red", soft_wrap=True)
    console.print()
    console.print(_rows(prediction))
    _batch(prediction, console.print)
    _plans(prediction, console.print)
    for note in prediction.notes:
        console.print(f"note: {note}", soft_wrap=True)


def diff(prediction: Prediction) -> str:
    """The fastest plan that fits, as a unified diff; what cannot be written as one changed line is a comment."""
    plan = next((plan for plan in prediction.plans if plan.need.fits), None)
    if prediction.fits:
        return "# fits as it is: nothing to change\n"
    if plan is None:
        return "# no plan fits\n"
    text = f"# {plan.title}" + (f": {plan.how}" if plan.how else "") + "\n"
    text += "".join(f"# at {_place(edit.line)}\n" for edit in plan.edits if not edit.replacement)
    for file in dict.fromkeys(edit.line.file for edit in plan.edits if edit.replacement):
        before = Path(file).read_text().splitlines(keepends=True)
        after = before[:]
        for edit in plan.edits:
            if edit.line.file == file and edit.replacement:
                after[edit.line.line - 1] = edit.replacement + "\n"
        name = _relative(file)
        text += "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
    return text


def _rows(prediction: Prediction) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("at the peak")
    made.add_column("memory", justify="right", no_wrap=True)
    made.add_column("where", overflow="fold")
    for row in prediction.rows:
        where = _place(row.line) if row.line.file else ""
        module = f" ({row.line.module})" if row.line.module else ""
        made.add_row(row.kind, size_text(row.nbytes), where + module)
    made.add_row("total", size_text(sum(row.nbytes for row in prediction.rows)), style="bold")
    return made


def _batch(prediction: Prediction, say: object) -> None:
    batch = prediction.batch
    assert callable(say)
    if batch.size is not None and batch.need is not None:
        where = f", set at {_place(batch.line)}" if batch.line.file else ""
        why = f", {batch.why}" if batch.why else ""
        text = f"largest batch that fits: {batch.size} (now {batch.current}{where}{why}), {_need(batch.need)}"
        say(f"\n{text}", soft_wrap=True)
    elif batch.why:
        say(f"\nlargest batch that fits: unknown, {batch.why}", soft_wrap=True)


def _plans(prediction: Prediction, say: object) -> None:
    assert callable(say)
    if not prediction.plans:
        return
    made = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    made.add_column("plan", overflow="fold")
    made.add_column("reserved + context", justify="right", no_wrap=True)
    made.add_column("fits", no_wrap=True)
    made.add_column("step", justify="right", no_wrap=True)
    for plan in prediction.plans[:_MAX_PLANS]:
        about = "~" if plan.estimate else ""
        time = f"{plan.seconds / prediction.seconds:.2f}x" if prediction.seconds else ""
        made.add_row(
            plan.title + ("" if plan.exact else " (changes the results)"),
            about + size_text(plan.need.total),
            "yes" if plan.need.fits else "no",
            time,
        )
    say()
    say(made)
    say("step: estimated time against the step as it is; ~: estimated memory, the others were run", soft_wrap=True)
    best = next((plan for plan in prediction.plans if plan.need.fits), None)
    if best is None:
        say("\nno plan fits", soft_wrap=True)
        return
    say(f"\nfastest plan that fits: {best.title}", soft_wrap=True)
    _instructions(best, say)


def _instructions(plan: Plan, say: object) -> None:
    assert callable(say)
    if plan.how:
        say(f"  {plan.how}", soft_wrap=True)
    for edit in plan.edits:
        code = f": {edit.replacement.strip()}" if edit.replacement else ""
        say(f"  at {_place(edit.line)}{code}", soft_wrap=True)


def _need(need: Need) -> str:
    return f"reserved {size_text(need.reserved)}, with the context {size_text(need.total)}"


def _place(line: Line) -> str:
    return f"{_relative(line.file)}:{line.line}" if line.file else "at an unknown line"


def _relative(path: str) -> str:
    inside = os.path.relpath(path)
    return path if inside.startswith("..") else inside
