"""Which statement gave a variable the tensor that it carries, and whether the step itself runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.leaks.source.holder_names import HolderName
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.observe.heap.walk import Held
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.older_graph import GraphHolder, Import, named
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.assignments import flat, targets_of
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.layer_construction import class_nodes
from torchmedic.source.spots import spot_of_traced
from torchmedic.source.syntax import FUNCTIONS, LOOPS, callee, has_line, innermost, nodes_in, syntax_tree

Carrier = tuple[str, Filler]  # a variable that brings an old graph in, and the statement that gave it its value


def carrier_of(failure: BackwardFailure, imports: Provenance, found: Import, *, resets: bool = False) -> Carrier | None:
    """The variable that holds an old tensor and is assigned in the source, from the innermost frame outwards."""
    holders = list(_holders(failure, found))
    for holder, frame in sorted(holders, key=lambda pair: _is_passing(failure, *pair)):
        places = [
            (holder.name, _filler(file, binding, in_step=_runs_in_step(failure, imports, file, binding)))
            for file, body in _scopes(failure, holder, frame)
            for binding in _bindings_of(holder, body, resets=resets)
        ]
        if places:
            return max(places, key=lambda place: (place[1].in_loop, place[1].node.lineno))
    return None


def _filler(file: str, binding: ast.stmt, *, in_step: bool) -> Filler:
    return Filler(file, binding, getattr(binding, "value", None), in_step)


def _is_passing(failure: BackwardFailure, holder: GraphHolder, frame: Frame | None) -> bool:
    """Whether a variable was given the tensor in this step, out of something that had it before."""
    step = failure.step
    if holder.owner is not None or holder.is_passing or step is None or frame is None or frame.live is not step.frame:
        return holder.is_passing
    for statement in step.segment.statements:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == holder.name]
        if isinstance(statement, ast.AugAssign) or any(isinstance(node.ctx, ast.Load) for node in names):
            return not names
        if names:
            return True
    return False


def _holders(failure: BackwardFailure, found: Import) -> Iterator[tuple[GraphHolder, Frame | None]]:
    """The holders seen in the replay, then those in the frames around the step; each with its frame, if known."""
    frames = failure.evidence.frames
    step = failure.step
    position = next((at for at, frame in enumerate(frames) if step is not None and frame.live is step.frame), 0)
    own = frames[position] if frames else None
    for holder in found.holders:
        yield holder, None if holder.is_local else own
    for frame in reversed(frames[:position]):
        if frame.is_user:
            for holder in named(found.tensor, frame.live, spot_of_traced(frame), is_local=True):
                yield holder, frame


def _scopes(failure: BackwardFailure, holder: GraphHolder, frame: Frame | None) -> Iterator[tuple[str, ast.AST]]:
    if holder.owner is not None:
        yield from class_nodes(type(holder.owner))
        for file in dict.fromkeys(frame.file for frame in failure.evidence.frames if frame.is_user):
            tree = syntax_tree(file)
            if tree is not None:
                yield file, tree
        return
    file, line = (frame.file, frame.line) if frame is not None else (holder.spot.file, holder.spot.line)
    tree = syntax_tree(file)
    if tree is None:
        return
    function = innermost(tree, line, FUNCTIONS)
    if function is not None:
        yield file, function
        if any(part.arg == holder.name for part in ast.walk(function) if isinstance(part, ast.arg)):
            return
    yield file, ast.Module([node for node in tree.body if not isinstance(node, FUNCTIONS | ast.ClassDef)], [])
    if holder.is_item and not holder.is_passing:
        yield file, tree  # a container that functions fill


def _bindings_of(holder: GraphHolder, body: ast.AST, *, resets: bool) -> list[ast.stmt]:
    """The statements in a piece of source that give a holder its value or an item; plain resets only if wanted."""
    key = f"[{holder.key!r}]" if isinstance(holder.key, str) else ""
    name = HolderName(Held(holder.name + key, holder.name.rpartition(".")[2], "items", 0, "", local=1))
    found: list[ast.stmt] = []
    for statement in ast.walk(body):
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = flat(targets_of(statement))
            given = any(name.matches(each) and not name.names_other_keys(each) for each in targets)
            if given and (resets or not _is_reset(statement)):
                found.append(statement)
        elif isinstance(statement, ast.Expr) and any(True for _ in name.puts(statement.value)):
            found.append(statement)
    return found


def _is_reset(statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
    """`h = None`, `total = 0`, `h = torch.zeros(...)`: nothing that could carry a graph."""
    if isinstance(statement, ast.AugAssign):
        return False
    value = statement.value
    if value is None or isinstance(value, ast.Constant | ast.UnaryOp):
        return True
    if isinstance(value, ast.List | ast.Dict | ast.Tuple):
        return not any(isinstance(node, ast.Name) for node in ast.walk(value))
    name = callee(value) if isinstance(value, ast.Call) else ""
    return name in ("zeros", "ones", "zeros_like", "randn", "empty", "tensor", "list", "dict", "deque", "detach")


def _runs_in_step(failure: BackwardFailure, imports: Provenance, file: str, binding: ast.stmt) -> bool:
    tree = syntax_tree(file)
    if tree is None:
        return False
    function = innermost(tree, binding.lineno, FUNCTIONS)
    for frame in failure.evidence.frames:
        # A loop of a frame on the stack that contains the statement and the line that the frame is at.
        if frame.file == file and frame.is_user and innermost(tree, frame.line, FUNCTIONS) is function:
            loops = [node for node in nodes_in(function or tree) if isinstance(node, LOOPS)]
            around = [loop for loop in loops if has_line(loop, frame.line)]
            if any(has_line(loop, binding.lineno) for loop in around):
                return True
            # A function that is called once per step.
            is_of_step = failure.step is not None and frame.live is failure.step.frame
            return not around and function is not None and is_of_step
    if function is None:
        return False
    spots: set[Spot] = {spot for call in imports.calls for spot in call.stack}
    return any(spot.file == file and has_line(function, spot.line) for spot in spots)
