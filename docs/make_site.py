"""Build the documentation site from README, guides, tutorial, gallery and the pages of all codes.

    .venv/bin/python docs/make_site.py [FOLDER]

The site is written to docs/_build/site (or FOLDER) by MkDocs with the theme Material. It loads nothing from a network, and
its search works without a server. Warnings, such as a link that leads nowhere, are errors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torchmedic.diagnose import catalogue

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```python [^\n]*$", re.MULTILINE)
REMOTE_SHIM = "https://unpkg.com/iframe-worker/shim"
LOADED = re.compile(r"<(?:script|img|iframe)[^>]*src=.?https?:|<link[^>]*stylesheet[^>]*https?:", re.IGNORECASE)
FIRST = ("tutorial.md", "gallery.md")


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS / "_build" / "site").resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        staged = stage(place / "pages")
        (place / "mkdocs.yml").write_text(json.dumps(settings(staged, target)))  # JSON is YAML
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(place / "mkdocs.yml")]
        subprocess.run(command, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    keep_offline(target)
    print(f"wrote {target / 'index.html'}")


def sources() -> dict[Path, str]:
    """Every file of the site, with its place there."""
    found = {ROOT / "README.md": "index.md", ROOT / "CONTRIBUTING.md": "contributing.md"}
    found |= {ROOT / "CHANGELOG.md": "changelog.md", ROOT / "skills/torchmedic/SKILL.md": "skill.md"}
    for pattern in ("*.md", "diagnoses/*.md", "images/*", "failures/*.py"):
        found |= {path: str(path.relative_to(DOCS)) for path in sorted(DOCS.glob(pattern))}
    found[DOCS / "diagnoses" / "README.md"] = "diagnoses/index.md"
    return found


def stage(pages: Path) -> dict[Path, str]:
    """Copy all files to one folder, with links that fit there."""
    staged = sources()
    for path, name in staged.items():
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = FENCE.sub("```python", path.read_text())
            target.write_text(LINK.sub(lambda match: moved(match, path, name, staged), text))
        else:
            shutil.copy(path, target)
    return staged


def moved(match: re.Match[str], path: Path, name: str, staged: dict[Path, str]) -> str:
    """A link as it must be on the site. What is not part of the site becomes plain text."""
    sign, text, target = match.groups()
    file, _, anchor = target.partition("#")
    if not file or re.match(r"[a-z]+:", file):
        return match[0]
    there = staged.get((path.parent / file).resolve())
    if there is None:
        return text
    new = os.path.relpath(there, os.path.dirname(name) or ".")
    return f"{sign}[{text}]({new}{'#' + anchor if anchor else ''})"


def keep_offline(target: Path) -> None:
    """Take the script for a search without a server (iframe-worker 1.0.4, MIT) from here, not from a network."""
    shutil.copytree(DOCS / "vendor" / "iframe-worker", target / "assets" / "iframe-worker")
    for page in target.rglob("*.html"):
        local = os.path.relpath(target / "assets" / "iframe-worker" / "shim.js", page.parent)
        text = page.read_text().replace(REMOTE_SHIM, local)
        assert not LOADED.search(text), f"{page} loads something from a network"
        page.write_text(text)


def settings(staged: dict[Path, str], target: Path) -> dict[str, object]:
    guides = [name for name in staged.values() if re.fullmatch(r"[a-z_]+\.md", name)]
    others = {"index.md", "contributing.md", "changelog.md", "skill.md", "promises.md", *FIRST}
    families: dict[str, list[dict[str, str]]] = {}
    for entry in catalogue.entries():
        family = f"TM{entry.code[2]}xx {entry.family}"
        page = f"diagnoses/{entry.code}-{entry.name}.md"
        families.setdefault(family, []).append({f"{entry.code} {entry.name}": page})
    return {
        "site_name": "torchmedic",
        "docs_dir": "pages",
        "site_dir": str(target),
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,  # fonts would be loaded from a network
            "features": ["navigation.tabs", "navigation.indexes", "search.highlight", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search", "offline"],
        "markdown_extensions": ["tables", "toc", "pymdownx.highlight", "pymdownx.superfences"],
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"}},
        "extra": {"generator": False},
        "nav": [
            {"Home": "index.md"},
            {"Tutorial": "tutorial.md"},
            {"Gallery": "gallery.md"},
            {"Guides": sorted(set(guides) - others)},
            {"Diagnoses": ["diagnoses/index.md", *({name: pages} for name, pages in families.items())]},
            {"Project": ["promises.md", "skill.md", "contributing.md", "changelog.md"]},
        ],
    }


if __name__ == "__main__":
    main()
