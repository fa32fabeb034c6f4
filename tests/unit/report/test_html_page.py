"""The page: nothing of the run becomes markup, nothing is loaded, and it stays small."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from runs import diagnosis, whole

from torchmedic.cli import main
from torchmedic.records import Report
from torchmedic.report.html import page, run_data
from torchmedic.runfolder import confidential, files

NASTY = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\"'--> \u202e\x1b[31m\x00\u2028 `<i>` {{7*7}}"
)
# Every element that the templates may write.
KNOWN = set(
    "html head meta title style body a header span main section article p h1 h2 h3 strong code figure figcaption div "
    "mark button br ul ol li details summary table caption thead tbody tfoot tr th td pre svg rect path line text defs"
    " marker i footer script".split()
)


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the content of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.words += data


def test_no_text_of_a_run_becomes_markup() -> None:
    text = page.render(whole(NASTY)).decode()
    parsed = Parsed(text)
    assert {tag for tag, _ in parsed.elements} <= KNOWN | {"title"}
    for tag, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "action", "srcdoc")], tag
        assert set(attributes.get("href") or "#verdict") == set("#verdict")
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    assert "<img" not in text
    assert "49" not in re.findall(r"\{\{.*?\}\}", parsed.words)  # a template in the text is text
    assert "{{7*7}}" in parsed.words
    assert not set("\u202e\x1b\x00\u2028") & set(text)
    assert "\\u202e" in parsed.words


def test_the_data_can_be_read_by_other_tools() -> None:
    data = whole(NASTY)
    parsed = Parsed(page.render(data).decode())
    block = json.loads(parsed.scripts[0])
    assert msgspec.convert(block["report"], Report) == data.report
    names = [line["name"] for curve in block["curves"][:4] for line in curve["lines"]]
    assert names == [
        *("loss", "gradient norm", "learning rate"),
        *("resident memory of the process", "allocated on the device"),
    ]
    assert block["memory"][0]["nbytes"] == 1000
    assert block["waits"][0][0]["target"] == 1


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page.render(whole()).decode()
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|<link|<iframe|<object|<embed", text.replace("//n", ""))
    assert set(re.findall(r"url\([^)]*\)", text)) <= {"url(#tip)"}
    assert "default-src 'none'" in text


def test_tables_pictures_and_headings_suit_a_screen_reader() -> None:
    text = page.render(whole()).decode()
    assert text.count("<table") == text.count("<caption")
    for svg in re.findall(r"<svg[^>]*>", text):
        assert 'role="img"' in svg
        assert 'aria-label="' in svg
    levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    referenced = re.findall(r'aria-labelledby="([^"]+)"', text)
    assert set(referenced) <= set(identifiers)


@pytest.mark.parametrize("text", ["<" * 20_000, "word " * 4_000, "\u202e" * 9_000])
def test_a_page_stays_below_its_bound(text: str) -> None:
    data = whole()
    many = tuple(diagnosis(text) for _ in range(100))
    large = replace(data, report=replace(data.report, diagnoses=many), processes=data.processes * 40)
    rendered = page.render(replace(large, calls=dict.fromkeys(range(100), text)))
    assert len(rendered) < page.MAX_BYTES
    assert b"more findings" in rendered


def test_a_page_of_nothing_says_so() -> None:
    text = page.render(run_data.RunData(name="run", report=Report())).decode()
    assert "Nothing was found" in text
    assert "Leon Sorokin" not in text  # no curve, no library


def test_contrast_of_text_is_sufficient_in_both_themes() -> None:
    css = (Path(page.__file__).parent / "templates" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", part)) for part in css.split("@media")[:2])
    for theme in (light, dark):
        for background in ("bg", "card"):
            for name in ("text", "muted", "error", "warning", "note", "good", "other"):
                assert _contrast(theme[name], theme[background]) >= 4.5, (name, background)
        for name, background in (
            ("text", "mark-cause"),
            ("text", "mark-other"),
            ("good", "good-bg"),
            ("text", "bad-bg"),
        ):
            assert _contrast(theme[name], theme[background]) >= 4.5, (name, background)
        for name in ("data", "forward", "backward", "optimizer", "otherphase", *(f"k{n}" for n in range(8))):
            assert _contrast(theme[name], theme["bg"]) >= 3.0, name


def _contrast(one: str, two: str) -> float:
    """By the definition of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_report_writes_the_page_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write_report(tmp_path, whole().report)
    assert main(["report", "--html", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    assert main(["report", "--html", "-o", str(tmp_path / "other.html"), str(tmp_path / "report.json")]) == 0
    assert (tmp_path / "other.html").read_bytes()[:15] == b"<!doctype html>"
    capsys.readouterr()
    assert main(["report", "--html", "-o", str(tmp_path / "no" / "x.html"), str(tmp_path)]) == 2
    assert main(["report", "--html", "--format", "json", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_page_is_written_only_if_there_is_something_to_say(tmp_path: Path) -> None:
    files.write_report(tmp_path, Report(diagnoses=(diagnosis(severity="note"),)))
    page.write(tmp_path)
    assert not (tmp_path / "report.html").exists()
    files.write_report(tmp_path, Report(diagnoses=(diagnosis(),)))
    page.write(tmp_path)
    assert "some text" in (tmp_path / "report.html").read_text()
    # What was found has been taken back: the page that is there must not go on saying it.
    files.write_report(tmp_path, Report())
    page.write(tmp_path)
    assert "Nothing was found" in (tmp_path / "report.html").read_text()


def test_a_confidential_page_names_no_holder_and_no_source_line(tmp_path: Path) -> None:
    data = replace(whole(), confidential=True, calls={}, stalls=(), report=Report())
    text = page.render(data).decode()
    assert "Containers that held most" not in text
    assert ":3</td>" not in text
    confidential.mark_confidential(tmp_path)
    files.write_report(tmp_path, Report(diagnoses=(diagnosis(),)))
    assert run_data.read(tmp_path).confidential
