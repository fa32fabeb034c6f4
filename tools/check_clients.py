"""Hand what torchmedic writes to the programs that read it, and its integrations to versions that CI does not have.

    make clients                                        # all parts
    .venv/bin/python tools/check_clients.py github sarif

github    annotations, against the library that GitHub's own actions print theirs with (npm)
sarif     SARIF files, by Microsoft's validator with the rules of GitHub code scanning (npm)
mcp       the MCP server, by the client of the official SDK
notebook  the notebook tests, with the IPython and ipykernel of Colab
ray       the tests with Ray Train

All but `mcp` need a network. Packages are installed into a temporary folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAILURES = ("nan", "in_place", "silent", "diverge")
GITHUB = "@actions/core@3.0.1"
VALIDATOR = "@microsoft/sarif-multitool-linux@5.7.0"
COLAB = ("ipython==7.34.0", "ipykernel==6.17.1", "nbclient==0.11.0")
RAY = ("ray[train]==2.60.0",)
HOSTILE = "50 % of a, b: c::error file=x::\r\n::stop-commands::x \u202e\x1b[0m</script>"
PRINT = """
import * as core from "@actions/core";
import fs from "fs";
const commands = JSON.parse(fs.readFileSync(0, "utf8"));
for (const { command, message, properties } of commands) core[command](message, properties);
"""
# The parts of a workflow command, and how the library calls its properties.
COMMAND = re.compile(r"::(?P<command>error|warning|notice) (?P<properties>[^:]*)::(?P<data>.*)")
NAMES = {"title": "title", "file": "file", "line": "startLine", "col": "startColumn", "endColumn": "endColumn"}
ESCAPES = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}


def main(wanted: list[str]) -> None:
    parts = {
        "github": check_github,
        "sarif": check_sarif,
        "mcp": check_mcp,
        "notebook": check_notebook,
        "ray": check_ray,
    }
    for name in wanted or parts:
        with tempfile.TemporaryDirectory(prefix="torchmedic-clients-") as folder:
            print(f"{name}: {parts[name](Path(folder))}", flush=True)


def check_github(folder: Path) -> str:
    """Every annotation must be what the library prints for the values that are in it, byte for byte."""
    shown = "".join(torchmedic(folder, "report", "--format", "github", str(run)) for run in runs(folder))
    assert len(shown.splitlines()) == len(FAILURES) + 1, shown
    commands = [parsed(line) for line in shown.splitlines()]
    npm(folder, GITHUB)
    (folder / "print.mjs").write_text(PRINT)
    printed = subprocess.run(
        ["node", "print.mjs"], cwd=folder, input=json.dumps(commands), capture_output=True, text=True, check=True
    )
    assert printed.stdout == shown, f"{printed.stdout}\n--- is not ---\n{shown}"
    assert commands[-1]["message"].startswith("50 % of a, b: c::error file=x::"), commands[-1]
    return f"{len(commands)} annotations are those of {GITHUB}, byte for byte"


def parsed(line: str) -> dict[str, Any]:
    """A workflow command as the runner reads it."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    given = dict(each.split("=", 1) for each in found["properties"].split(","))
    properties = {NAMES[name]: unescaped(value) for name, value in given.items()}
    return {"command": found["command"], "message": unescaped(found["data"]), "properties": properties}


def unescaped(text: str) -> str:
    return re.sub("|".join(ESCAPES), lambda found: ESCAPES[found[0]], text)


def check_sarif(folder: Path) -> str:
    """The validator must find no error. A file that is broken on purpose shows that it would."""
    files = []
    for run in runs(folder):
        files.append(folder / f"{run.name}.sarif")
        torchmedic(folder, "report", "--format", "sarif", "-o", str(files[-1]), str(run))
    broken = folder / "broken.sarif"
    broken.write_text(files[0].read_text().replace('"startLine": ', '"startLine": -'))
    npm(folder, VALIDATOR)
    validator = folder / "node_modules/@microsoft/sarif-multitool-linux/Sarif.Multitool"
    validator.chmod(0o755)

    def errors(paths: list[Path]) -> list[str]:
        said = subprocess.run(
            [validator, "validate", *paths, "--rule-kind", "Sarif;Ghas"], capture_output=True, text=True, check=False
        )
        return [line for line in said.stdout.splitlines() if re.search(r"\): error|^error|exception", line)]

    assert errors([broken]), "the validator finds nothing wrong in a broken file"
    assert not errors(files), "\n".join(errors(files))
    return f"{VALIDATOR} finds no error in {len(files)} files"


def runs(folder: Path) -> list[Path]:
    """The run folders of some failures, and of one whose texts are hostile."""
    made = []
    for name in FAILURES:
        source = (ROOT / f"docs/failures/{name}.py").read_text()
        (folder / f"{name}.py").write_text(source)
        torchmedic(folder, "run", "--output", f"run-{name}", f"{name}.py")
        made.append(folder / f"run-{name}")
    report = json.loads((made[0] / "report.json").read_text())
    found = report["diagnoses"][0]
    found["message"] = HOSTILE
    found["locations"] = [{**place, "file": HOSTILE, "code": HOSTILE, "label": HOSTILE} for place in found["locations"]]
    hostile = folder / "run-hostile"
    hostile.mkdir()
    (hostile / "report.json").write_text(json.dumps(report))
    return [*made, hostile]


def check_mcp(folder: Path) -> str:
    return tested(sys.executable, "test_mcp.py")


def check_notebook(folder: Path) -> str:
    return f"{tested(environment(folder, COLAB), 'test_notebook.py')} with {', '.join(COLAB)}"


def check_ray(folder: Path) -> str:
    return f"{tested(environment(folder, RAY), 'test_ray.py')} with {', '.join(RAY)}"


def environment(folder: Path, packages: tuple[str, ...]) -> str:
    """A Python that has these packages, and all others from the environment of the project."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env/bin/python"
    constraints = ["-c", str(ROOT / "constraints.txt")] if packages != COLAB else []
    command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, *packages]
    subprocess.run([python, *command], check=True)
    (site,) = folder.glob("env/lib/python3*/site-packages")
    lines = [str(ROOT / "src"), sysconfig.get_paths()["purelib"], *sys.path]
    (site / "project.pth").write_text("\n".join(path for path in lines if path.endswith(("src", "site-packages"))))
    return str(python)


def tested(python: str, name: str) -> str:
    test = ROOT / "tests/integration" / name
    command = [python, "-m", "pytest", "-p", "no:xdist", str(test)]
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    return f"{test.name} passes"


def torchmedic(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torchmedic", *arguments]
    return subprocess.run(command, cwd=folder, env=clean(), capture_output=True, check=False).stdout.decode()


def npm(folder: Path, package: str) -> None:
    subprocess.run(["npm", "install", "--silent", "--ignore-scripts", "--prefix", folder, package], check=True)


def clean() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHMEDIC", "GITHUB_"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main(sys.argv[1:])
