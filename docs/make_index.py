"""Write docs/diagnoses/README.md, the list of all diagnoses, from the docstrings of the rules."""

from __future__ import annotations

from pathlib import Path

from torchmedic.diagnose import catalogue


def index() -> str:
    lines = [
        "# Diagnoses",
        "",
        "`make docs` writes this list. Each page contains a script that fails with its code, and a corrected script.",
    ]
    family = ""
    for entry in catalogue.entries():
        if entry.family != family:
            family = entry.family
            lines += ["", f"## TM{entry.code[2]}xx: {family}", "", "| code | name | what |", "|---|---|---|"]
        lines.append(f"| [{entry.code}]({entry.code}-{entry.name}.md) | {entry.name} | {entry.summary} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "diagnoses" / "README.md").write_text(index())
