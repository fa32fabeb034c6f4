"""Write docs/gallery.md, the pictures of reports, and the list in docs/report.md of what their first screens show.

    .venv/bin/python docs/make_gallery.py

Every script in docs/failures is run under torchmedic, and its report is opened in Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from chromium import Chromium  # noqa: E402

SCREENS = {1440: 900, 375: 812}  # height by width, in pixels
MAX_BYTES = 120_000  # of a picture
BEGIN, END = "<!-- first screens: begin -->", "<!-- first screens: end -->"


class Failure(NamedTuple):
    name: str
    title: str
    options: tuple[str, ...] = ()
    is_pictured: bool = False


FAILURES = (
    Failure("nan", "The loss is NaN", is_pictured=True),
    Failure("out_of_memory", "Out of memory", is_pictured=True),
    Failure("hang", "Training stops responding", ("--stall-after", "5", "--on-stall", "kill"), is_pictured=True),
    Failure("silent", "It trains, but learns badly", is_pictured=True),
    Failure("label", "CUDA device-side assert, or a target out of bounds"),
    Failure("in_place", "A variable needed for gradient computation was modified in place"),
    Failure("no_graph", "Element 0 of tensors does not require grad"),
    Failure("diverge", "The loss explodes"),
    Failure("worker", "Caught an exception in a DataLoader worker"),
    Failure("leak", "Memory grows with every step"),
)

# What a reader must see without scrolling, by name and selector.
PARTS = {
    "cause": "h1",
    "line": ".line.is-cause, .frame .label.cause",
    "cure": ".cure .sub",
    "proof": ".cure .proof",
}


def main() -> None:
    images = HERE / "images"
    images.mkdir(exist_ok=True)
    parts = [
        "# Gallery",
        "",
        "Ten failures as torchmedic shows them. `docs/make_gallery.py` writes this page from real runs of the scripts in",
        "[failures](failures).",
    ]
    rows = []
    with tempfile.TemporaryDirectory() as place, Chromium(Path(place) / "profile") as browser:
        folder = Path(place)
        for failure in FAILURES:
            text = run(folder, failure)
            assert text.startswith(("error[", "warning[")), text
            parts += ["", f"## {failure.title}", "", f"[{failure.name}.py](failures/{failure.name}.py)", ""]
            parts += [f"    {line}".rstrip() for line in text.splitlines()]
            page = folder / failure.name / "report.html"
            rows.append(row(failure.title, text, first_screens(browser, page)))
            if failure.is_pictured:
                parts += ["", *(f"![{failure.title}]({name})" for name in photograph(browser, page, failure.name))]
            print(rows[-1], page.stat().st_size, "bytes", flush=True)
        assert not browser.complaints, browser.complaints
    (HERE / "gallery.md").write_text("\n".join(parts) + "\n")
    table = [
        "| failure | cause | line | cure | seen at 1440 pixels | seen at 375 pixels |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    report = HERE / "report.md"
    before, _, rest = report.read_text().partition(BEGIN)
    report.write_text("\n".join([f"{before}{BEGIN}", *table, END]) + rest.partition(END)[2])


def run(folder: Path, failure: Failure) -> str:
    """Run a script, and return what torchmedic says about it."""
    shutil.copy(HERE / "failures" / f"{failure.name}.py", folder)
    command = [sys.executable, "-m", "torchmedic", "run", "--output", failure.name, *failure.options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHMEDIC_")}
    # Some of the scripts are meant to fail.
    done = subprocess.run(
        [*command, f"{failure.name}.py"],
        cwd=folder,
        env={**environment, "COLUMNS": "96"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    # The traceback of Python stands before or behind it.
    found = re.search(r"^(error|warning)\[TM.*?^explain: [^\n]*", done.stderr, re.MULTILINE | re.DOTALL)
    return found[0] if found is not None else done.stderr


def row(title: str, text: str, seen: str) -> str:
    """What a report says, and which of it is on the first screen, as a line of a table."""
    flat = re.sub(r"\s+", " ", text)
    said = re.search(r"\[(TM\d+)\]: (.*?) --> (\S+?):(\d+):", flat)
    cure = re.search(r"help: (.*?) +\[(proven|not tried|estimated|predicted)?", flat)
    assert said is not None, text
    advice = f"{cure[1]} ({cure[2] or 'see report'})" if cure is not None else ""
    return f"| {title} | {said[1]}: {said[2]} | {said[3]}:{said[4]} | {advice} | {seen} |"


def first_screens(browser: Chromium, page: Path) -> str:
    """What is on the first screen of a page, at each width."""
    cells = []
    for width, height in SCREENS.items():
        browser.open(page, width=width, dark=False, height=height)
        seen = [name for name, selector in PARTS.items() if browser.evaluate(VISIBLE % (selector, height))]
        cells.append(", ".join(seen))
    return " | ".join(cells)


VISIBLE = (
    "(function () { var e = document.querySelector('%s'); return !!e && e.getBoundingClientRect().bottom <= %d; })()"
)


def photograph(browser: Chromium, page: Path, name: str) -> list[str]:
    """The first screen in both themes and widths."""
    made = []
    for width, height in SCREENS.items():
        for dark in (False, True):
            browser.open(page, width=width, dark=dark, height=height)
            picture = HERE / "images" / f"report-{name}-{width}-{'dark' if dark else 'light'}.webp"
            browser.screenshot(picture)
            assert picture.stat().st_size <= MAX_BYTES, picture
            made.append(f"images/{picture.name}")
            if keep := os.environ.get("GALLERY_PNG"):  # the whole page, to look at
                browser.screenshot(Path(keep) / f"{picture.stem}.png", whole=True)
    return made


if __name__ == "__main__":
    main()
