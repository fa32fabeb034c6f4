"""Make docs/images: run the scripts in docs/failures under torchmedic, and photograph their reports in Chromium.

    .venv/bin/python docs/make_screenshots.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from chromium import Chromium  # noqa: E402

# Name, options of `torchmedic run`, width in pixels, dark theme.
PICTURES = (
    ("nan", (), 1160, False),
    ("out_of_memory", (), 1160, True),
    ("hang", ("--stall-after", "5", "--on-stall", "kill"), 1160, False),
    ("silent", (), 375, True),
)
MAX_BYTES = 120_000


def main() -> None:
    (HERE / "images").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder) / "profile") as browser:
        for name, options, width, dark in PICTURES:
            run(Path(folder), name, options)
            browser.open(Path(folder) / name / "report.html", width=width, dark=dark)
            picture = HERE / "images" / f"report-{name}.png"
            browser.screenshot(picture)
            print(f"{picture.relative_to(HERE.parent)}: {picture.stat().st_size} bytes")
            assert picture.stat().st_size <= MAX_BYTES
        assert not browser.complaints, browser.complaints


def run(folder: Path, name: str, options: tuple[str, ...]) -> None:
    shutil.copy(HERE / "failures" / f"{name}.py", folder)
    command = [sys.executable, "-m", "torchmedic", "run", "--output", name, *options, f"{name}.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHMEDIC_")}
    # Some of the scripts are meant to fail.
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
