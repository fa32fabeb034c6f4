"""Write docs/diagnoses/README.md, the list of all diagnoses, from what the rules say of themselves."""

from __future__ import annotations

from pathlib import Path

from torchmedic.diagnose import catalogue

FAMILIES = {
    "1": "the graph: shapes, types, modules, autograd",
    "2": "numbers",
    "3": "devices, labels and indices",
    "4": "memory",
    "5": "hangs",
    "6": "the training loop",
    "7": "several ranks",
    "8": "process, data loading, host",
    "9": "could not tell",
}


def index() -> str:
    lines = [
        "# Diagnoses",
        "",
        "Written by `make docs`. Each page holds a script that fails with its code, and a cured twin.",
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
