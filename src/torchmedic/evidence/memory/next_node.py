"""The node that backward was at when it failed, on a device whose allocator does not tell.

The engine goes through the nodes from the last to the first, and each throws away what it had saved once it is through:
of those that have not, the last was next.
"""

from __future__ import annotations

from typing import Any

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.book import Book
from torchmedic.evidence.memory.accounting.saved_by_graph import sequence_of, tensors_saved_by
from torchmedic.source.objects.graph import is_counted, node_of, walk


def next_node(evidence: RaisedEvidence, book: Book) -> Any:
    """None where nothing tells: the call keeps its graph, or nothing of it is left."""
    call = evidence.inside("backward", "grad")
    if call is None or _keeps(call.variables):
        return None
    given = call.variables.get("tensors") or call.variables.get("outputs") or ()
    roots = [node_of(each) for each in given if hasattr(each, "grad_fn")] if isinstance(given, tuple | list) else []
    nodes = walk(roots or map(node_of, book.live), set())
    left = [node for node in nodes if is_counted(node) and tensors_saved_by(node)]
    return max(left, key=sequence_of, default=None)


def _keeps(variables: Any) -> bool:
    return bool(variables.get("retain_graph") or variables.get("create_graph"))
