"""Patches as people and assistants write them: found by their lines, refused if they do not fit."""

from __future__ import annotations

import pytest

from torchmedic.source.unified_diff import BadPatch, applied, old_numbers, parse

TEXT = ["a = 1", "b = 2", "if a:", "    c = 3", "", "d = 4", "b = 2"]


def after(patch: str) -> list[str]:
    (hunks,) = parse(patch).values()
    return applied(TEXT, hunks)


def test_a_hunk_with_wrong_numbers_is_found_by_its_lines() -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -90,3 +90,4 @@ if a:\n if a:\n-    c = 3\n+    c = 5\n+    e = 6\n\n"
    assert list(parse(patch)) == ["x.py"]
    assert after(patch) == ["a = 1", "b = 2", "if a:", "    c = 5", "    e = 6", "", "d = 4", "b = 2"]


def test_the_nearest_of_several_places_is_taken() -> None:
    head = "--- x.py\n+++ x.py\n"
    assert after(f"{head}@@ -7 +7 @@\n-b = 2\n+b = 9\n")[6] == "b = 9"
    assert after(f"{head}@@ -2 +2 @@\n-b = 2\n+b = 9\n")[1] == "b = 9"
    with pytest.raises(BadPatch, match="2 places"):
        after(f"{head}@@\n-b = 2\n+b = 9\n")


def test_lines_are_only_added_or_only_removed() -> None:
    head = "--- x.py\n+++ x.py\n"
    assert after(f"{head}@@ -1,0 +2 @@\n+z = 0\n")[:3] == ["a = 1", "z = 0", "b = 2"]
    assert after(f"{head}@@ -6 +5,0 @@\n-d = 4\n") == [*TEXT[:5], "b = 2"]


def test_several_files_and_hunks() -> None:
    patch = "--- x.py\n+++ x.py\n@@ -1 +1 @@\n-a = 1\n+a = 0\n@@ -6 +6 @@\n-d = 4\n+d = 5\n"
    patch += "--- y.py\n+++ y.py\n@@ -1 +1 @@\n-q\n+r\n"
    found = parse(patch)
    assert {name: len(hunks) for name, hunks in found.items()} == {"x.py": 2, "y.py": 1}
    assert applied(TEXT, found["x.py"])[::5] == ["a = 0", "d = 5"]


@pytest.mark.parametrize(
    "patch",
    [
        "",
        "add an epsilon",
        "@@ -1 +1 @@\n-a = 1\n+a = 2\n",
        "--- x.py\n+++ x.py\n",
        "--- x.py\n+++ x.py\n@@ -1 +1 @@\n-q\n+r\n",
    ],
)
def test_what_is_no_patch_of_the_file_is_refused(patch: str) -> None:
    with pytest.raises(BadPatch):
        after(patch)


def test_new_lines_take_the_numbers_of_the_old() -> None:
    assert old_numbers(["a", "b", "c"], ["a", "x", "y", "c"]) == [1, 2, 2, 3]
    assert old_numbers(["a", "c"], ["a", "b", "c"]) == [1, 2, 2]
    assert old_numbers(["a", "b", "c"], ["c"]) == [3]
    assert old_numbers(["a"], ["a", "b", "c"]) == [1, 1, 1]
