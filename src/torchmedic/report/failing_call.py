"""The failing operation that a run folder keeps, as source text that can be read without torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchmedic.errors import UnreadableRun
from torchmedic.records import Diagnosis
from torchmedic.repro import recipe as recipes
from torchmedic.repro.recipe import Bad, Raises, Recipe
from torchmedic.repro.wording import statement
from torchmedic.runfolder import layout
from torchmedic.runfolder.confidential import is_confidential


def find(run: Path, diagnosis: Diagnosis) -> Recipe | None:
    """The recording that belongs to a diagnosis; None if there is none, or if it is damaged."""
    if is_confidential(run):
        return None
    for folder in layout.process_folders(run):
        for path in recipes.recipes(folder):
            with contextlib.suppress(UnreadableRun):
                held = recipes.read(path)
                if (held.code, held.message) == (diagnosis.code, diagnosis.message) and not held.why_not:
                    return held
    return None


def text(recipe: Recipe) -> str:
    """Inputs, calls and outcome, a line each. Values are left out: `torchmedic repro` writes a script with them."""
    lines = [f"# {each.name}: {each.dtype} {list(each.shape)} on {each.device}" for each in recipe.inputs]
    lines += [statement(line) for line in recipe.lines]
    outcome = recipe.outcome
    if isinstance(outcome, Raises):
        lines.append(f"# raises {outcome.kind}")
    elif isinstance(outcome, Bad):
        what = f"the gradient of {outcome.of}" if outcome.gradient else outcome.of
        lines.append(f"# {what} holds {'NaN' if outcome.kind == 'nan' else 'infinity'}")
    return "\n".join(lines)
