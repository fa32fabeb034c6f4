"""A comment at the line that says: this is meant.

`# torchmedic: ignore` for everything that is found there, `# torchmedic: ignore[TM603]` for some codes.
"""

from __future__ import annotations

import linecache
import os
import re

from torchmedic.records import Diagnosis

_COMMENT = re.compile(r"#\s*torchmedic:\s*ignore(?:\[([^\]]*)\])?")


def is_suppressed(diagnosis: Diagnosis) -> bool:
    """Whether the line to blame carries the comment."""
    cause = diagnosis.cause_location
    if cause is None:
        return False
    found = _COMMENT.search(linecache.getline(os.path.abspath(cause.file), cause.line) or cause.code)
    return found is not None and (found[1] is None or diagnosis.code in re.split(r"[\s,]+", found[1].strip()))
