"""An incident of the loop, with the live objects and the source that belong to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.loop.ledger import Habits
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, calls_in, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file


class LoopEvidence:
    """What a rule about the loop looks at."""

    def __init__(self, incident: LoopIncident, agent: ProcessContext) -> None:
        self.incident = incident
        self.habits: Habits = agent.habits
        self.step_number, self.rank = incident.step, agent.rank

    def at(self, role: Role, where: Place | None, label: str, *methods: str) -> Location | None:
        """A line of the user's; the call of one of these methods on it, where there is exactly one."""
        if where is None or not where.line:
            return None
        calls = list(self.calls(where, *methods)) if methods else []
        if len(calls) == 1:
            return node_location(role, where.file, calls[0], label)
        return place(role, where.file, where.line, label)

    def calls(self, where: Place, *methods: str) -> Iterator[ast.Call]:
        """The calls of these functions or methods that begin on a line."""
        tree = syntax_tree(where.file)
        for node in nodes_in(tree):
            if isinstance(node, ast.Call) and has_line(node, where.line) and callee(node) in methods:
                yield node

    def optimizer_name(self, where: Place) -> str:
        """What the optimizer is called where it steps; empty where it cannot be told."""
        for call in self.calls(where, "step"):
            if call.args and isinstance(call.func, ast.Attribute) and "scaler" in ast.unparse(call.func.value).lower():
                return ast.unparse(call.args[0])
            if isinstance(call.func, ast.Attribute):
                return ast.unparse(call.func.value)
        return ""

    def receiver(self, where: Place, method: str) -> str:
        """What a method is called on, on a line; empty where it cannot be told."""
        calls = list(self.calls(where, method))
        if len(calls) != 1 or not isinstance(calls[0].func, ast.Attribute):
            return ""
        return ast.unparse(calls[0].func.value)

    def calls_in(self, file: str, name: str) -> list[ast.Call]:
        """Every call of a function or class in a file."""
        tree = syntax_tree(file)
        return [node for node in calls_in(tree) if ast.unparse(node.func).split(".")[-1] == name]

    def classes(self, file: str) -> list[ast.ClassDef]:
        tree = syntax_tree(file)
        return [node for node in nodes_in(tree) if isinstance(node, ast.ClassDef)]

    def assignments(self, file: str, target: str) -> list[ast.stmt]:
        """The statements of a file that assign to a name or an attribute, written like this."""
        tree = syntax_tree(file)
        found: list[ast.stmt] = []
        for node in nodes_in(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            found += [node for each in targets if ast.unparse(each) == target and isinstance(node, ast.stmt)]
        return found

    def is_users(self, where: Place | None) -> bool:
        return where is not None and bool(where.line) and is_user_file(where.file)
