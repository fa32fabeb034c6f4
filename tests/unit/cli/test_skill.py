"""SKILL.md and the pages on assistants name only commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchmedic.cli import _parser
from torchmedic.errors import TorchmedicError

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"^ {4,}(torchmedic [^#\n]*)", re.MULTILINE)


@pytest.mark.parametrize("name", ["skills/torchmedic/SKILL.md", "docs/assistants.md", "docs/report.md", "README.md"])
def test_every_command_can_be_parsed(name: str) -> None:
    commands = COMMAND.findall((ROOT / name).read_text())
    assert commands
    for command in commands:
        words = shlex.split(re.sub(r"\[|\]|&\s*$", "", command).replace("PID", "12"))
        try:
            _parser().parse_args(words[1:])
        except TorchmedicError as error:
            pytest.fail(f"{name}: {command}: {error}")


def test_a_skill_says_its_name_and_when_it_is_for() -> None:
    text = (ROOT / "skills/torchmedic/SKILL.md").read_text()
    head = text.split("---")[1]
    assert re.search(r"^name: torchmedic$", head, re.MULTILINE)
    description = re.search(r"^description: (.*)$", head, re.MULTILINE)
    assert description is not None
    assert 100 < len(description[1]) <= 1024
