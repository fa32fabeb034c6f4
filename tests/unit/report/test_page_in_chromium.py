"""The page in a real browser: both themes, both widths, no complaint, no request, copy and zoom work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import BINARY, Chromium
from runs import whole

from torchmedic.report.html import page

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


def test_a_page_is_shown_without_complaint_or_request(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(page.render(whole("a `long` text " * 12)))
    pictures = set()
    for width in (375, 1440):
        for dark in (False, True):
            browser.open(path, width=width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.querySelectorAll('.live canvas').length") == 8
            shot = tmp_path / f"{width}-{dark}.png"
            browser.screenshot(shot)
            pictures.add(shot.read_bytes())
    assert len(pictures) == 4
    assert set(browser.requests) == {path.as_uri()}
    assert browser.complaints == []


def test_text_of_a_run_is_never_executed(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    nasty = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"><svg onload=window.hit=1>"
    path.write_bytes(page.render(whole(nasty)))
    browser.open(path, width=1440, dark=False)
    assert browser.evaluate("window.hit === undefined")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.querySelector('h1').textContent") == nasty
    assert browser.complaints == []


def test_the_patch_is_copied_and_a_keyboard_reaches_it(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(page.render(whole()))
    browser.open(path, width=1440, dark=False)
    browser.evaluate(
        "Object.defineProperty(navigator, 'clipboard',"
        " {value: {writeText: text => { window.got = text; return Promise.resolve(); }}})"
    )
    browser.evaluate("(async () => { document.querySelector('button.copy').click(); await 0; })()")
    assert browser.evaluate("window.got").startswith("--- some text\n+++ some text\n@@ -3 +3 @@\n")
    assert browser.evaluate("document.getElementById('status').textContent") == "The patch was copied."
    reachable = "document.querySelectorAll('button:not([hidden]), summary, a[href], [tabindex=\"0\"]').length"
    assert browser.evaluate(reachable) > 5
