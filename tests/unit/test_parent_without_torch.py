"""The parent explains deaths, and must do so at once: to import torch there would take seconds."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from torchmedic.diagnose import registry, engine
for name in (*registry.DEATHS, *registry.STALLED):
    registry.load(name)
import torchmedic.supervise.supervisor, torchmedic.supervise.run, torchmedic.supervise.attach.attach, torchmedic.cli
import torchmedic.report.html.page, torchmedic.report.sarif, torchmedic.report.prompt, torchmedic.report.github
assert "torch" not in sys.modules
"""


def test_the_rules_on_deaths_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
