"""Write a standalone script with the operation that failed, and check that it fails in the same way.

examples:
  torchmedic repro .torchmedic/2026-11-15T010203-train
  torchmedic repro --output nan.py .torchmedic/2026-11-15T010203-train

The script contains the failing call with its inputs, made as small as possible. It needs torch, but none of your code.
Values that do not fit into the script are in a .safetensors file of the same name beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchmedic.errors import ExitStatus, TorchmedicError, UnreadableRun, UsageError

if TYPE_CHECKING:
    from torchmedic.repro.check import Made

NAME = "repro"
_MODULES = frozenset({".py", ".pyc", ".so", ".pyd"})
_MAX_RECORDINGS = 1000


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, or its report.json")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="the script to write (default: repro.py in the run folder)"
    )


def execute(args: argparse.Namespace) -> int:
    from torchmedic.report.console import stdout_console
    from torchmedic.repro import check

    folder = args.run if args.run.is_dir() else args.run.parent
    recipe = _recipe(args.run, folder)
    output: Path = args.output or folder / "repro.py"
    _refuse_to_overwrite(args.output)
    _refuse_modules_beside(output, folder)
    made = check.make(recipe, output) or check.make(recipe, output, shrink=False)
    if made is None:
        raise TorchmedicError("the failing operation ended the process that was to write its script")
    checked = check.check(output)
    if not checked.reproduced:
        made = check.make(recipe, output, shrink=False) or made
        checked = check.check(output)
    beside = f" and {output.with_suffix('.safetensors')}" if made.values is not None else ""
    console = stdout_console()
    console.print(f"wrote {output}{beside} ({made.lines} lines; {_shapes(made)})", soft_wrap=True)
    if not checked.reproduced:
        console.print(f"checked: it does NOT fail in the same way ({checked.said})", soft_wrap=True)
        return ExitStatus.FAILED
    said = checked.said.removeprefix("reproduced").removeprefix(": ")
    console.print("checked: it fails in the same way" + (f" ({said})" if said else ""), soft_wrap=True)
    return ExitStatus.OK


def _refuse_to_overwrite(output: Path | None) -> None:
    if output is None:
        return
    if output.suffix != ".py":
        raise UsageError(f"cannot write to {output}: the name of a script ends in .py")
    for path in (output, output.with_suffix(".safetensors")):
        if path.exists():
            raise UsageError(f"cannot write to {path}: it exists")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"cannot write to {output}: there is no such folder")


def _refuse_modules_beside(output: Path, run: Path) -> None:
    """Refuse to write a script beside Python files of a run folder: whoever runs the script would import them.

    Raises:
        UsageError: There are such files.
    """
    folder = output.absolute().parent.resolve()
    if not folder.is_relative_to(run.resolve()):
        return
    for path in sorted(folder.iterdir()):
        is_module = path.suffix in _MODULES or (path.is_dir() and any(path.glob("__init__.*")))
        if is_module and path.name != output.name:
            raise UsageError(
                f"cannot write to {output}: a script there would import {path.name}, which torchmedic did not write "
                "(choose another place with --output)"
            )


def _recipe(run: Path, folder: Path) -> Path:
    """The recording of the first diagnosis that has one.

    Raises:
        UnreadableRun: There is no recording; the text is the reason.
    """
    from torchmedic.records.plain_text import cleaned
    from torchmedic.repro import recipe
    from torchmedic.runfolder import files, layout
    from torchmedic.runfolder.confidential import is_confidential

    report = files.read_report(run)
    if not report.diagnoses:
        raise UnreadableRun(f"there is nothing to reproduce: {run} holds no diagnosis")
    if is_confidential(folder):
        raise UnreadableRun("there is nothing to reproduce: the run was started with --confidential and kept no values")
    paths = [path for process in layout.process_folders(folder) for path in recipe.recipes(process)]
    if len(paths) > _MAX_RECORDINGS:
        raise UnreadableRun(f"cannot read {run}: it holds {len(paths)} recordings, more than {_MAX_RECORDINGS}")
    found = {path: recipe.read(path) for path in paths}
    why = f"{report.diagnoses[0].code} cannot be reproduced by a script: no operation was recorded when it happened"
    for diagnosis in report.diagnoses:
        for path, held in found.items():
            if (held.code, cleaned(held.message)) != (diagnosis.code, cleaned(diagnosis.message)):
                continue
            if not held.why_not:
                return path
            why = f"{held.code} cannot be reproduced by a script: {held.why_not}"
    raise UnreadableRun(why)


def _shapes(made: Made) -> str:
    before, after = (
        ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "") for shapes in (made.before, made.after)
    )
    return f"inputs {before}" if before == after else f"inputs shrunk from {before} to {after}"
