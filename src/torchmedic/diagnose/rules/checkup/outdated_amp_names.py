"""The script uses deprecated names for mixed precision.

What: `torch.cuda.amp.autocast` and `torch.cuda.amp.GradScaler` still work, but warn that they will be removed.

Why: the old names supported only CUDA; the new names support other devices too.

Cure: use `torch.autocast("cuda", ...)` or `torch.amp.autocast("cuda", ...)`, and `torch.amp.GradScaler("cuda")`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import nodes_in, syntax_tree

_NEW = {"autocast": 'torch.autocast("cuda")', "GradScaler": 'torch.amp.GradScaler("cuda")'}


@rule("TM641", "outdated-amp-names")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        found = _used(graph.key[0]) if graph.is_outdated else None
        if found is None:
            continue
        node, name = found
        draft = check.draft(evidence, "proven")
        draft.message = f"torch.cuda.amp.{name} is a deprecated name, which torch will remove"
        draft.cause = "it still works, and warns"
        draft.at(node_location("cause", graph.key[0], node, "the old name"))
        draft.help(f"use {_NEW[name]}")
        return draft.about(step=graph.step).rated("note")
    return None


def _used(file: str) -> tuple[ast.expr | ast.stmt, str] | None:
    tree = syntax_tree(file)
    for node in nodes_in(tree):
        match node:
            case ast.ImportFrom(module="torch.cuda.amp", names=names):
                known = [alias.name for alias in names if alias.name in _NEW]
                if known:
                    return node, known[0]
            case ast.Attribute(attr=name) if name in _NEW and ast.unparse(node) == f"torch.cuda.amp.{name}":
                return node, name
    return None
