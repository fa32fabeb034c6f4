"""Whether a function looks at its own variables as a dict, so that reading them from outside could be seen.

Before Python 3.13 there is one dict of locals per frame: whoever reads `frame.f_locals` fills it anew, and what
`locals()` has given to the function changes with it.
"""

from __future__ import annotations

import dis
from types import CodeType

_READING = frozenset({"locals", "vars", "dir", "exec"})
_known: dict[int, tuple[CodeType, bool]] = {}
_MAX_FUNCTIONS = 2000  # that are remembered


def looks_at_locals(code: CodeType) -> bool:
    """Whether it may call `locals`, `vars`, `dir`, `exec` or the function `eval`; `model.eval()` is none of these."""
    names = code.co_names
    if not _READING.isdisjoint(names):
        return True
    if "eval" not in names:
        return False
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= _MAX_FUNCTIONS:
            _known.clear()
        loaded = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        found = _known[id(code)] = (code, "eval" in loaded)
    return found[1]
