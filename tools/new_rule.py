"""Begin a rule: `make new-rule CODE=TM180 NAME=bad-thing` writes its files and registers it.

Written are the rule, its page, its test cases, its line in the registry and its line in the index. The rule says
nothing yet, so `tests/integration/test_pages.py -k CODE` fails until the rule and the page are filled in.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """What a rule with a code below `end` looks at, and where it goes."""

    end: int
    folder: str
    family: str  # in registry.py
    module: str
    evidence: str
    argument: str = "evidence"


KINDS = (
    Kind(150, "autograd", "RAISED", "evidence.exception", "RaisedEvidence"),
    Kind(170, "shapes", "RAISED", "evidence.exception", "RaisedEvidence"),
    Kind(200, "modules", "RAISED", "evidence.exception", "RaisedEvidence"),
    Kind(300, "numbers", "NUMBERS", "evidence.numbers", "NumbersEvidence"),
    Kind(400, "devices", "RAISED", "evidence.exception", "RaisedEvidence"),
    Kind(450, "memory", "RAISED", "evidence.exception", "RaisedEvidence"),
    Kind(500, "memory", "GROWING", "evidence.leaks.evidence", "LeakEvidence"),
    Kind(600, "hangs", "STALLED", "records.stall", "Stall", "stall"),
    Kind(630, "loop", "SILENT", "evidence.loop", "LoopEvidence"),
    Kind(650, "checkup", "CHECKUP", "evidence.check_up", "CheckUp"),
    Kind(656, "loop", "SILENT", "evidence.loop", "LoopEvidence"),
    Kind(700, "checkup", "CHECKUP", "evidence.check_up", "CheckUp"),
    Kind(740, "ranks", "RANKS", "records.ranks", "Job", "job"),
    Kind(800, "", "", "", ""),  # free
    Kind(820, "process", "DEATHS", "records.death", "Death", "death"),
    Kind(900, "process", "RAISED", "evidence.exception", "RaisedEvidence"),
)

RULE = '''"""TODO: what happened, in one sentence without a code or a cure.

What: TODO.

Why: TODO.

Cure: TODO.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.{kind.module} import {kind.evidence}


@rule("{code}", "{name}")
def check({kind.argument}: {kind.evidence}) -> Draft | None:
    # TODO: draft = check.draft({kind.argument}, "proven"); set draft.message and draft.cause;
    # return draft.at(...).because(...).help(...)
    return None
'''

PAGE = """# {code} {name}

TODO: what the diagnosis says, and how it knows.

## A script that fails

TODO: the mistake, in one sentence.

```python fails
import torch

TODO = 1 / 0  # <- cause
```

## The cure

TODO: what to change. The twin looks suspicious and is healthy.

```python passes
import torch
```
"""

CASES = """Other shapes of {code} (another loop, a Trainer class, a helper module), and healthy scripts that look alike.

=== as-on-the-page {code}
import torch
TODO = 1 / 0  # <- cause

=== looks-alike healthy
import torch
"""


class Refused(Exception):
    """Why nothing is written, in one line."""


def kind_of(code: str) -> Kind:
    if not re.fullmatch(r"TM[1-9]\d\d", code):
        raise Refused(f"{code!r} is no code: write TM and three digits, such as TM180")
    found = next((kind for kind in KINDS if int(code[2:]) < kind.end), None)
    if found is None or not found.folder or int(code[2:]) < 100:
        raise Refused(f"{code} belongs to no family of rules (see CONTRIBUTING.md)")
    return found


def check_free(rules: Path, code: str, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise Refused(f"{name!r} is no name: write lower-case words with hyphens, such as division-by-zero")
    for path in sorted(rules.rglob("*.py")):
        found = re.search(r'^@\w*rule\("(\w+)", "([\w-]+)"', path.read_text(encoding="utf-8"), re.M)
        if found is not None and code == found[1]:
            raise Refused(f"{code} is taken by {found[2]} ({path.relative_to(rules)})")
        if found is not None and name == found[2]:
            raise Refused(f"the name {name} is taken by {found[1]} ({path.relative_to(rules)})")


def registered(source: str, kind: Kind, module: str) -> str:
    """The registry with one more rule: before the last of its folder, which is the most general."""
    start = source.index(f"\n{kind.family}: Family[")
    end = source.index("\n)\n", start)
    last = source.rindex(f'    "{kind.folder}.', start, end)
    return f'{source[:last]}    "{kind.folder}.{module}",\n{source[last:]}'


def write(root: Path, code: str, name: str) -> list[Path]:
    """Write all files of a rule; nothing where the code or the name cannot be had."""
    kind = kind_of(code)
    diagnose = root / "src" / "torchmedic" / "diagnose"
    check_free(diagnose / "rules", code, name)
    module = name.replace("-", "_")
    registry = diagnose / "registry.py"
    texts = {
        registry: registered(registry.read_text(encoding="utf-8"), kind, module),
        diagnose / "rules" / kind.folder / f"{module}.py": RULE.format(code=code, name=name, kind=kind),
        root / "docs" / "diagnoses" / f"{code}-{name}.md": PAGE.format(code=code, name=name),
        root / "tests" / "integration" / "rule_cases" / f"{code}.txt": CASES.format(code=code),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    subprocess.run([sys.executable, str(root / "docs" / "make_index.py")], env=environment, check=True)
    return [*texts, root / "docs" / "diagnoses" / "README.md"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("code", metavar="CODE")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    args = parser.parse_args()
    try:
        written = write(args.root, args.code, args.name)
    except Refused as why:
        print(f"new-rule: {why}", file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(args.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
