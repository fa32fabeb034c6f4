"""The help of every verb fits a terminal of 80 columns, and shows one spelling of each option."""

from __future__ import annotations

import pytest

from torchmedic.cli import COMMANDS, main


@pytest.mark.parametrize("verb", [command.NAME for command in COMMANDS])
def test_help_fits_a_terminal(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    long = [line for line in text.splitlines() if len(line) > 80 and "{" not in line]  # a list of choices is one word
    assert not long
    assert "--fail_on" not in text
    if "examples:" in text:
        assert f"\n  torchmedic {verb}" in text  # an example keeps its line


@pytest.mark.parametrize("words", [["explain"], ["explain", "TM208"]])
def test_an_explanation_fits_a_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(words)
    plain = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    main(words)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 < max(map(len, plain.splitlines()))
    assert shown.split() == plain.split()
