"""How tests run scripts that hang, and slow ones that do not: many side by side, as they mostly sleep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from running import Finished, clean_environment, torchmedic
from zygote import Zygote

STALL_AFTER = 1.5
SIDE_BY_SIDE = 5
_SETS = "# environment:"  # what a process must be born with
KILL = ("--on-stall", "kill")


def run_all(folder: Path, scripts: Mapping[str, str], *options: str) -> dict[str, Finished]:
    """Run scripts under `torchmedic run --stall-after`, each in a folder of its own; by their names."""
    return run_each(folder, {name: (source, options) for name, source in scripts.items()})


def run_each(folder: Path, scripts: Mapping[str, tuple[str, Sequence[str]]]) -> dict[str, Finished]:
    """The same, each with options of its own."""

    def run(name: str) -> Finished:
        source, options = scripts[name]
        place = folder / re.sub(r"\W", "_", name)
        place.mkdir()
        (place / "train.py").write_text(source)
        if source.startswith(_SETS):
            wanted = dict(word.split("=") for word in source.splitlines()[0].removeprefix(_SETS).split())
            return torchmedic(place, "--stall-after", str(STALL_AFTER), *options, "train.py", **wanted)
        command = ["run", "--output", "run", "--stall-after", str(STALL_AFTER), *options, "train.py"]
        status, out, err = Zygote.run(place, command, clean_environment(), 250)
        return Finished(status, out, err, place / "run")

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return dict(zip(scripts, pool.map(run, scripts), strict=True))
