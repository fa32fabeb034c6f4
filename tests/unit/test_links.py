"""Every link of the documentation leads to a file and a heading that exist. No network is needed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/diagnoses").glob("*.md"),
        *(ROOT / "skills").glob("**/*.md"),
    ]
)


@cache
def text_of(path: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """The anchors of the headings of a page, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def problems(path: Path) -> list[str]:
    found = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(path))):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", file):
            continue  # of the network
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            found.append(f"{target}: there is no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors_of(there):
            found.append(f"{target}: there is no such heading")
    return found


def test_every_link_leads_somewhere() -> None:
    assert len(PAGES) > 200
    wrong = {str(path.relative_to(ROOT)): found for path in PAGES if (found := problems(path))}
    assert wrong == {}


def test_every_guide_is_linked_from_another_page() -> None:
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in PAGES
        for target in LINK.findall(text_of(path))
        if not re.match(r"[a-z]+:", target)
    }
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path.resolve() not in linked] == []


@pytest.mark.parametrize("text", ["[a](missing.md)", "[a](there.md#no-such)"])
def test_a_wrong_link_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "there.md").write_text("# Here\n")
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n[right](there.md#here)\n")
    assert len(problems(page)) == 1
