"""Build wheel and sdist, check them, and run the demo from the wheel in an empty environment beside a user's torch.

    make dist

The wheel must not replace the torch of the environment, and must hold everything that a report needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
IN_WHEEL = (
    "torchmedic/py.typed",
    "torchmedic/demos/constant_row.py",
    "torchmedic/report/html/templates/page.html.j2",
    "torchmedic/report/html/templates/page.js",
    "torchmedic/report/html/vendor/uplot/LICENSE",
    "torchmedic/report/html/vendor/uplot/uPlot.iife.min.js",
)
IN_SDIST = (
    *("README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml"),
    *(
        "docs/tutorial.md",
        "docs/make_site.py",
        "skills/torchmedic/SKILL.md",
        "tests/conftest.py",
        "tools/check_dist.py",
    ),
)
TORCH = "import hashlib, torch; print(torch.__version__, hashlib.sha256(open(torch.__file__, 'rb').read()).hexdigest())"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (wheel,) = DIST.glob("*.whl")
    (sdist,) = DIST.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        use_wheel(wheel, Path(folder))
    print(
        f"checked {wheel.name} ({wheel.stat().st_size >> 10} KiB) and {sdist.name} ({sdist.stat().st_size >> 10} KiB)"
    )


def check_contents(wheel: Path, sdist: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in IN_WHEEL if name not in names]
    assert not missing, f"{wheel.name} lacks {missing}"
    strange = [name for name in names if not name.startswith(("torchmedic/", "torchmedic-"))]
    assert not strange, f"{wheel.name} holds {strange[:5]}"
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_SDIST if name not in held]
    assert not missing, f"{sdist.name} lacks {missing}"


def use_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel beside a torch, and run the demo in a folder of its own."""
    venv.create(folder / "env", with_pip=True)
    python = str(folder / "env/bin/python")
    run([python, *PIP, "torch", "numpy"])  # the user's own
    before = output([python, "-c", TORCH])
    run([python, *PIP, str(wheel)])
    assert output([python, "-c", TORCH]) == before, "the installation has changed torch"
    work = folder / "work"
    work.mkdir()
    torchmedic = str(folder / "env/bin/torchmedic")
    demo = subprocess.run([torchmedic, "demo"], cwd=work, env=clean(), capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stderr
    assert "error[TM201]" in demo.stderr, demo.stderr
    assert "[proven on your step" in demo.stderr, demo.stderr
    (made,) = (work / ".torchmedic").glob("*/report.html")
    assert b"torchmedic-data" in made.read_bytes()
    refused = subprocess.run([torchmedic, "mcp"], cwd=work, env=clean(), capture_output=True, text=True, check=False)
    assert "pip install 'torchmedic[mcp]'" in refused.stderr, refused.stderr  # the extra is not installed
    print(f"the demo ran from the wheel beside torch {before.split()[0]}")


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, env=clean())


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, env=clean(), capture_output=True, text=True).stdout


def clean() -> dict[str, str]:
    """The environment without what could lead back to this checkout."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in left_out and not key.startswith("TORCHMEDIC")}


if __name__ == "__main__":
    main()
