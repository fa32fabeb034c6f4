"""Write docs/diagnoses/README.md, the list of all diagnoses, from the docstrings of the rules."""

from __future__ import annotations

from pathlib import Path

from torchmedic.diagnose import catalogue

FAMILIES = {
    "1": "autograd, shapes, dtypes, modules",
    "2": "NaN and infinity",
    "3": "devices, labels and indices",
    "4": "memory",
    "5": "hangs",
    "6": "silent mistakes in the training loop",
    "7": "several ranks",
    "8": "process, data loading, host",
    "9": "cause not known",
}


def index() -> str:
    lines = [
        "# Diagnoses",
        "",
        "`make docs` writes this list. Each page contains a script that fails with its code, and a corrected script.",
    ]
    family = ""
    for entry in catalogue.entries():
        if entry.code[2] != family:
            family = entry.code[2]
            lines += ["", f"## TM{family}xx: {FAMILIES[family]}", "", "| code | name | what |", "|---|---|---|"]
        lines.append(f"| [{entry.code}]({entry.code}-{entry.name}.md) | {entry.name} | {entry.summary} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "diagnoses" / "README.md").write_text(index())
