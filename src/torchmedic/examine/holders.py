"""The biggest holders of memory in a process, written down when memory is short.

The parent reads it, also if this process does not live to say more. Few imports: there is no memory for many.
"""

from __future__ import annotations

from torchmedic.evidence.leaks.held_lines import with_lines
from torchmedic.observe.context import ReportingProcess
from torchmedic.observe.heap.walk import Held
from torchmedic.runfolder.layout import is_confidential


def report_holders(found: list[tuple[Held, int]], process: ReportingProcess) -> None:
    """Write down the holders and their bytes, with the lines that fill them."""
    if not is_confidential(process.run):
        process.open().events.write("holders", step=process.clock.step, holders=with_lines(found))
