"""An exception whose own methods raise ends a script exactly as without torchmedic, and is explained if it can be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pairs import plainly, watched
from running import run_script

pytestmark = pytest.mark.timeout(300)

METHODS = {
    "str exits": "def __str__(self): raise SystemExit(7)",
    "str raises": "def __str__(self): raise ValueError('no')",
    "repr exits": "def __repr__(self): raise SystemExit(7)",
    "class raises": "@property\n    def __class__(self): raise ValueError('no')",
    "class exits": "@property\n    def __class__(self): raise SystemExit(7)",
    "getattribute raises": "def __getattribute__(self, name): raise ValueError(name)",
    "getattribute exits": "def __getattribute__(self, name): raise SystemExit(7)",
    "getattr raises": "def __getattr__(self, name): raise ValueError(name)",
    "setattr raises": "def __setattr__(self, name, value): raise ValueError(name)",
    "eq raises": "def __eq__(self, other): raise ValueError('eq')",
    "hash raises": "def __hash__(self): raise ValueError('hash')",
    "bool raises": "def __bool__(self): raise ValueError('bool')\n    def __len__(self): raise ValueError('len')",
}

SCRIPT = """
import {module}


class Odd(RuntimeError):
    {method}


def step():
    raise Odd("odd")


{body}
"""

ENDINGS = {
    "str exits": "step()",
    "class raises": "try:\n    step()\nexcept BaseException as error:\n    raise KeyError('outer') from error",
    "getattribute exits": "step()",
    "setattr raises": "step()",
}


# One in the main thread; the test of threads below has all of them.
@pytest.mark.parametrize(
    "name", [name if at < 1 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(ENDINGS)]
)
def test_it_ends_as_without_torchmedic(tmp_path: Path, name: str) -> None:
    source = SCRIPT.format(module="{module}", method=METHODS[name], body=ENDINGS[name])
    (tmp_path / "train.py").write_text(source.format(module="json"))
    plain = plainly(tmp_path, "train.py")
    (tmp_path / "train.py").write_text(source.format(module="torch"))
    other = watched(tmp_path, "train.py")

    said, _, diagnosis = other.stderr.partition("\nerror[")
    assert (other.status, without_addresses(said)) == (plain.status, without_addresses(plain.stderr))
    assert "fault of its own" not in diagnosis
    # The exception is examined as far as it goes: the report names its class.
    assert "Odd" in (tmp_path / "run" / "report.json").read_text() or "KeyError" in plain.stderr


def without_addresses(text: str) -> str:
    """The text without what Python itself says of an object that it cannot show."""
    return re.sub(r"0x[0-9a-f]+|refcount : \d+", "...", text).strip()


def test_all_of_them_in_threads(tmp_path: Path) -> None:
    classes = "".join(f"class Odd{at}(RuntimeError):\n    {method}\n\n" for at, method in enumerate(METHODS.values()))
    threads = "".join(
        f"def raise_{at}(): raise Odd{at}('odd')\nthread = threading.Thread(target=raise_{at})\nthread.start()\n"
        "thread.join()\n"
        for at in range(len(METHODS))
    )
    source = "import threading, {module}\n" + classes + threads + "print('done')\n"
    (tmp_path / "train.py").write_text(source.replace("{module}", "json"))
    plain = plainly(tmp_path, "train.py")
    other = run_script(tmp_path, source.replace("{module}", "torch"))

    assert (other.returncode, other.stdout) == (plain.status, plain.stdout)
    assert without_addresses(other.stderr) == without_addresses(plain.stderr)


def test_a_hook_of_the_users_that_fails_is_shown_without_our_frames(tmp_path: Path) -> None:
    body = "def hook(*_):\n    raise ValueError('in the hook')\nsys.excepthook = hook\nimport {module}\n1 / 0\n"
    (tmp_path / "train.py").write_text("import sys\n" + body.format(module="json"))
    plain = plainly(tmp_path, "train.py")
    (tmp_path / "train.py").write_text("import sys\n" + body.format(module="torch"))
    other = watched(tmp_path, "train.py")

    said, _, _ = other.stderr.partition("\nerror[")
    assert (other.status, said.strip()) == (plain.status, plain.stderr.replace("import json", "import torch").strip())
