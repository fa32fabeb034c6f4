"""The loss counts padding: a part of its targets are positions of padding.

What: the targets were compared with the tokens that the model was given. At the positions of padding, the loss has
targets that count, and they are all the same class.

Why: `cross_entropy` leaves out the targets that are equal to `ignore_index`, which is -100 unless it is set. Padding of
another value counts like any token. The model soon predicts it well, so that the loss looks better than it is, and a
batch with much padding teaches less than one with little. No error is raised.

Cure: set `ignore_index` to the padding token, or set the targets of padding to -100.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.evidence.dataset_item import collations_in_use
from torchmedic.observe.checkup.padded_targets import MIN_SHARE, PaddedTargets
from torchmedic.records import Location
from torchmedic.source.assignments import assigned, is_blank
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import (
    FUNCTIONS,
    callee,
    function_of,
    has_line,
    innermost,
    last_name,
    nodes_in,
    own_nodes,
    syntax_tree,
)
from torchmedic.source.user_variables import user_trees

_MAX_NAMES = 3  # that stand for each other
_WRAPS = ("tensor", "as_tensor", "LongTensor", "stack")
_LABELS = "labels"  # what a model that computes its own loss calls its targets


@rule("TM660", "padding-in-loss")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for padded in graph.tokens.padded:
            if padded.share < MIN_SHARE:
                continue
            draft = check.draft(evidence, "likely")
            draft.message = f"the loss counts padding: {padded.share:.0%} of its targets belong to padding"
            draft.cause = "at positions of padding the targets are not left out, and are all the same"
            draft.at(*_places(evidence, padded))
            draft.because(f"the targets were compared with the tokens of the batch of step {graph.step}")
            draft.help(
                "set the targets of padding to -100, or give the loss the padding token as `ignore_index`",
                safety="changes-training",
            )
            return draft.about(step=graph.step).rated("warning")
    return None


def _places(evidence: CheckUp, padded: PaddedTargets) -> list[Location | None]:
    """Where the loss was built or called, or where a model that computes its own loss was given the targets."""
    birth = padded.node.birth
    layer = birth.layer() if birth is not None and birth.layer is not None else None
    label = "counts each target that is not -100"
    if birth is None or layer is None or isinstance(layer, nn.modules.loss._Loss):
        return [evidence.of_birth("cause", birth, label) if birth is not None else None]
    given = list(_labels_given())
    given = [each for each in given if _is_in_collation(*each)] or given  # after it, nothing changes a batch
    called = evidence.at("surfaced" if len(given) == 1 else "cause", padded.call.sites, label)
    return [node_location("cause", *given[0], "padding is a target, too"), called] if len(given) == 1 else [called]


def _labels_given() -> Iterator[tuple[str, ast.expr]]:
    """The expressions of the user's that make the targets: in a dict, in a call, for an item, or appended to it."""
    for file, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Dict(keys=keys, values=values):
                    given = [value for key, value in zip(keys, values, strict=True) if _is_name(key)]
                case ast.Call(func=ast.Attribute(value=ast.Subscript(slice=key), attr="append"), args=[value]) if (
                    _is_name(key)
                ):
                    given = [value]
                case ast.Call(keywords=keywords):
                    given = [word.value for word in keywords if word.arg == _LABELS]
                case ast.Assign(targets=[ast.Subscript(slice=key)], value=value) if _is_name(key):
                    given = [value]
                case _:
                    continue
            made = [_made(tree, value) for value in given]
            yield from ((file, value) for value in made if not is_blank(value) and not _passes_on(value))


def _is_name(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == _LABELS


def _made(tree: ast.AST, value: ast.expr) -> ast.expr:
    """The only expression that a name stands for in its function; for a list, what is appended."""
    around = innermost(tree, value.lineno, FUNCTIONS) or tree
    for _ in range(_MAX_NAMES):
        inner = value.args[0] if isinstance(value, ast.Call) and callee(value) in _WRAPS and value.args else value
        if not isinstance(inner, ast.Name):
            break
        nodes = list(own_nodes(around))
        found = [
            made
            for node in nodes
            for target, made in assigned(node)
            if isinstance(target, ast.Name) and target.id == inner.id and made is not value
        ]
        if found and all(is_blank(made) for made in found):
            calls = [node for node in nodes if isinstance(node, ast.Call) and callee(node) == "append" and node.args]
            found = [call.args[0] for call in calls if ast.unparse(call.func) == f"{inner.id}.append"]
        if len(found) != 1:
            break
        value = found[0]
    return value


def _passes_on(value: ast.expr) -> bool:
    """Whether an expression takes targets that there are, and adds nothing to them."""
    nodes = list(ast.walk(value))
    read = [node for node in nodes if isinstance(node, ast.Subscript) and _is_name(node.slice)]
    read += [node for node in nodes if last_name(node) == _LABELS]
    adds = any(isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and "pad" in callee(node)) for node in nodes)
    return bool(read) and not adds


def _is_in_collation(file: str, value: ast.expr) -> bool:
    """Whether an expression stands in a function that makes the batches of a loader."""
    for _, collate in collations_in_use():
        inner = getattr(collate, "data_collator", collate)  # the Trainer of Hugging Face puts its own around it
        function = inner if inspect.isroutine(inner) else type(inner).__call__
        code = getattr(function, "__code__", None)
        around = function_of(syntax_tree(file), code) if code is not None and code.co_filename == file else None
        if around is not None and has_line(around, value.lineno):
            return True
    return False
